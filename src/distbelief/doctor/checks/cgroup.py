"""What the container (cgroup) of this process limits. Versions 1 and 2; no limit where there is no such file."""

from __future__ import annotations

import contextlib
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # version 1 says so by a number near 2**63


def cpu_quota(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> float:
    """Cores' worth of time; 0: no limit."""
    found = []
    for folder in _folders(root, membership, "cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                found.append(int(quota) / int(period))
        with contextlib.suppress(OSError, ValueError):
            quota_us = int((folder / "cpu.cfs_quota_us").read_text())
            if quota_us > 0:
                found.append(quota_us / int((folder / "cpu.cfs_period_us").read_text()))
    return min(found, default=0.0)


def memory_left(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> tuple[int, int]:
    """The limit, and what is left of it, in bytes; (0, 0): no limit."""
    found = []
    for folder in _folders(root, membership, "memory"):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            with contextlib.suppress(OSError, ValueError):
                most = int((folder / limit).read_text())  # "max" is no number
                if most < _NO_LIMIT:
                    found.append((most - int((folder / used).read_text()), most))
    left, most = min(found, default=(0, 0))
    return most, max(left, 0)


def _folders(root: Path, membership: Path, controller: str) -> list[Path]:
    """Those that this process is in, from the innermost outwards: each may have a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base = root
        elif controller in controllers.split(","):
            base = root / controllers if (root / controllers).exists() else root / controller
        else:
            continue
        inner = Path(path.lstrip("/"))
        found += [base / inner, *(base / parent for parent in inner.parents)]
    return list(dict.fromkeys(found))
