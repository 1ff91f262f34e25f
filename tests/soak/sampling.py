"""What the processes of a run hold: memory, descriptors, segments, files. Reads /proc, and knows nothing of faults."""

from __future__ import annotations

import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import psutil

from tests.soak.rules.judging import Sample
from tests.support.runs.command import processes_of

MB = 1 << 20


def role_of(command: Sequence[str], name: str, forked: bool, is_member: bool) -> str:
    """The role of a process of a run. `forked`: its parent is a zygote.

    >>> role_of(["python", "-m", "distbelief.cli.main", "resume", "run"], "python", False, False)
    'lead'
    >>> role_of(["python", "-m", "distbelief.launch.zygote"], "python", True, True)
    'worker'
    """
    if name in ("reader", "reader parent"):
        return name
    if any(word.endswith("terminal.py") for word in command):
        return ""  # it belongs to the tests
    if "distbelief.cli.main" in command:
        verb = command[command.index("distbelief.cli.main") + 1]
        return {"train": "lead", "resume": "lead", "worker": "agent"}.get(verb, verb)
    if "distbelief.coordinator" in command:
        return "coordinator"
    if "distbelief.launch.zygote" in command:
        return ("worker" if is_member else "store") if forked else "zygote"
    return ""


def roles(mark: str, members: Collection[int]) -> dict[str, list[psutil.Process]]:
    """The living processes of a run by role; what does not belong to the product is left out."""
    found: dict[str, list[psutil.Process]] = defaultdict(list)
    there = processes_of(mark)
    zygotes = {process.pid for process in there if _is_zygote(process)}
    for process in there:
        with contextlib.suppress(psutil.Error):
            role = role_of(process.cmdline(), process.name(), process.ppid() in zygotes, process.pid in members)
            if role:
                found[role].append(process)
    return found


def _is_zygote(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "distbelief.launch.zygote" in process.cmdline()
    return False


def measure(by_role: dict[str, list[psutil.Process]], temporary: Path) -> Sample:
    """The largest process of each role counts: a leak of one must not be hidden by others."""
    sample: dict[str, float] = {}
    segments: dict[int, int] = {}
    for role, processes in by_role.items():
        sample[f"processes of {role}"] = len(processes)
        for process in processes:
            with contextlib.suppress(psutil.Error, OSError):
                _largest(sample, f"memory of {role}", process.memory_info().rss / MB)
                kinds = _descriptors(process.pid)
                _largest(sample, f"descriptors of {role}", kinds.total())
                if role == "worker":  # the role whose descriptors come and go with generations
                    for kind, count in kinds.items():
                        _largest(sample, f"descriptors of {role}, {kind}", count)
                segments |= _segments(process.pid)
    sample["segments"] = len(segments)
    sample["segment bytes"] = sum(segments.values())
    sample["temporary files"] = len(temporary_files(temporary))
    return sample


def temporary_files(folder: Path) -> list[Path]:
    """Without the empty folder that torch makes."""
    return [path for path in folder.rglob("*") if not path.name.startswith("torchinductor_")]


def _largest(sample: dict[str, float], name: str, value: float) -> None:
    sample[name] = max(sample.get(name, 0.0), value)


def _descriptors(pid: int) -> Counter[str]:
    """The number of open descriptors by kind: socket, pipe, eventfd, eventpoll, memfd, file."""
    found: Counter[str] = Counter()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found[kind_of(os.readlink(fd))] += 1
    return found


def kind_of(target: str) -> str:
    """
    >>> [kind_of(one) for one in ("socket:[7]", "anon_inode:[eventpoll]", "/memfd:x (deleted)", "/dev/null")]
    ['socket', 'eventpoll', 'memfd', 'file']
    """
    if target.startswith("/"):
        return "memfd" if target.startswith("/memfd:") else "file"
    kind, _, number = target.partition(":")
    return number.strip("[]") if kind == "anon_inode" else kind


def _segments(pid: int) -> dict[int, int]:
    """The memfds that a process has open: inode -> bytes in use."""
    found = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(fd).startswith("/memfd:"):
                there = fd.stat()
                found[there.st_ino] = there.st_blocks * 512
    return found


def bytes_of(paths: Iterable[Path]) -> int:
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def where_everything_is(by_role: dict[str, list[psutil.Process]]) -> list[str]:
    """A line per process: its role, state, and what it waits for in the kernel."""
    lines = []
    for role, processes in sorted(by_role.items()):
        for process in processes:
            with contextlib.suppress(psutil.Error, OSError):
                waits = {(Path(task) / "wchan").read_text() for task in Path(f"/proc/{process.pid}/task").iterdir()}
                lines.append(f"{role} {process.pid}: {process.status()}, waits in {', '.join(sorted(waits))}")
    return lines
