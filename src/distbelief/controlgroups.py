"""The limits that control groups (containers, batch jobs) set on memory, processors and processes; both versions.

A process is in one group per hierarchy, and each group around it may have a limit: the tightest one counts. The
functions on top are pure and take the texts of the files; those at the end read the files of this process.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

Texts = Mapping[str, str]
"""The files of one group: name -> content. Files that do not exist are left out."""

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60  # version 1 writes a number near 2**63 for "no limit"
_MEMORY_FILES = ("memory.max", "memory.current", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
_PROCESS_FILES = ("pids.max", "pids.current")
_CPU_FILES = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")


@dataclass(frozen=True)
class MemoryRoom:
    """A limit in bytes, and the part of it that can still be allocated."""

    limit: int
    free: int


def folders(membership: str, controller: str) -> list[PurePosixPath]:
    """The folders below /sys/fs/cgroup that may have this controller's files for a process, the innermost group first.

    `membership`: the text of /proc/self/cgroup. A container often sees only its own group, mounted as the root, but the
    path from outside; so every folder on the path is listed, and the caller skips folders that do not exist.

    >>> [str(folder) for folder in folders("0::/jobs/7", "memory")][:3]
    ['jobs/7', 'jobs', '.']
    >>> [str(folder) for folder in folders("4:cpu,memory:/docker/1", "memory")][:3]
    ['cpu,memory/docker/1', 'cpu,memory/docker', 'cpu,memory']
    """
    found: list[PurePosixPath] = []
    for line in membership.splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0":  # version 2
            bases = [PurePosixPath(), PurePosixPath("unified")]  # the second where both versions are mounted
        elif controller in controllers.split(","):
            bases = [PurePosixPath(controllers), PurePosixPath(controller)]
        else:
            continue
        # Of a group beside the container's own, as in /../other, only the container's own can be seen.
        inner = PurePosixPath(*(part for part in path.split("/") if part not in ("", ".", "..")))
        if ".." in path.split("/"):
            inner = PurePosixPath()
        for base in bases:
            found += [base / inner, *(base / parent for parent in inner.parents)]
    return list(dict.fromkeys(found))


def memory_room(groups: Iterable[Texts]) -> MemoryRoom | None:
    """The tightest of the memory limits; None: there is none.

    Page cache that the kernel drops before it refuses an allocation counts as free. That is the inactive part
    (`inactive_file`), and the part of the active one that no process has mapped as its code or data.

    >>> stat = "anon 300\\nfile_mapped 50\\ninactive_file 400\\nactive_file 80"
    >>> memory_room([{"memory.max": "1000", "memory.current": "900", "memory.stat": stat}, {"memory.max": "max"}])
    MemoryRoom(limit=1000, free=530)
    """
    found = []
    for texts in groups:
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _number(texts, limit_file), _number(texts, used_file)
            if limit is not None and used is not None:
                found.append(MemoryRoom(limit, limit - max(used - _reclaimable(texts.get("memory.stat", "")), 0)))
    return min(found, key=lambda room: (room.free, room.limit), default=None)


def _reclaimable(stat: str) -> int:
    entries = dict(line.split(None, 1) for line in stat.splitlines() if len(line.split()) == 2)

    def value(*names: str) -> int:
        return next((int(entries[name]) for name in names if entries.get(name, "").isdigit()), 0)

    # Version 1 has the sums over the groups below under names with `total_`.
    active, mapped = value("total_active_file", "active_file"), value("total_mapped_file", "file_mapped")
    return value("total_inactive_file", "inactive_file") + max(active - mapped, 0)


def _number(texts: Texts, name: str) -> int | None:
    text = texts.get(name, "").strip()
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None


def cpu_quota(groups: Iterable[Texts]) -> float:
    """Cores' worth of time, by the tightest limit; 0: no limit.

    >>> cpu_quota([{"cpu.max": "max 100000"}, {"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000"}])
    1.5
    """
    found = []
    for texts in groups:
        quota, period = (*texts.get("cpu.max", "").split(), "", "")[:2]
        if not quota:
            quota, period = texts.get("cpu.cfs_quota_us", "").strip(), texts.get("cpu.cfs_period_us", "").strip()
        if quota.isdigit() and period.isdigit():  # else "max" or -1: no limit
            found.append(int(quota) / int(period))
    return min(found, default=0.0)


def why_no_fork(error: OSError, groups: Sequence[tuple[str, Texts]], user_limit: int) -> str:
    """Why the kernel refused to fork, with the limits that can be the cause, the tightest first.

    `groups`: name and files of each control group around the process. `user_limit`: RLIMIT_NPROC, -1 for none.

    >>> full = OSError(errno.EAGAIN, "Resource temporarily unavailable")
    >>> why_no_fork(full, [("/jobs/7", {"pids.max": "40", "pids.current": "40"})], 500)
    'no more processes are allowed here (pids.max of the control group /jobs/7: 40, in use 40; RLIMIT_NPROC: 500)'
    """
    if error.errno == errno.ENOMEM:
        return "the kernel has no memory for another process (ENOMEM)"
    if error.errno != errno.EAGAIN:
        return error.strerror or str(error)
    limits = []
    for name, texts in groups:
        most, used = _number(texts, "pids.max"), _number(texts, "pids.current")
        if most is not None:
            limits.append((most - (used or 0), f"pids.max of the control group {name}: {most}, in use {used}"))
    texts_of_limits = [text for _, text in sorted(limits)]
    texts_of_limits += [f"RLIMIT_NPROC: {user_limit}"] if user_limit >= 0 else []
    named = "; ".join(texts_of_limits) or "kernel.pid_max, kernel.threads-max"
    return f"no more processes are allowed here ({named})"


# --- this process ----------------------------------------------------------------------------------------------------


def texts_of(
    controller: str, names: Iterable[str], root: Path = ROOT, membership: Path = MEMBERSHIP
) -> list[tuple[str, Texts]]:
    """(name, files) of each group around this process that has some of these files."""
    found: list[tuple[str, Texts]] = []
    for folder in folders(_text(membership) or "", controller):
        texts = {name: text for name in names if (text := _text(root / folder / name)) is not None}
        if texts:
            found.append((str(root / folder), texts))
    return found


def own_memory_room(root: Path = ROOT, membership: Path = MEMBERSHIP) -> MemoryRoom | None:
    return memory_room(texts for _, texts in texts_of("memory", _MEMORY_FILES, root, membership))


def own_cpu_quota(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float:
    return cpu_quota(texts for _, texts in texts_of("cpu", _CPU_FILES, root, membership))


def why_fork_failed(error: OSError) -> str:
    user_limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # The kernel does not count the processes of root against RLIMIT_NPROC.
    return why_no_fork(error, texts_of("pids", _PROCESS_FILES), -1 if os.geteuid() == 0 else user_limit)


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
