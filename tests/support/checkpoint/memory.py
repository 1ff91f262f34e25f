"""By how much this process grows while something is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20


def peak_growth_bytes(task: Callable[[], object]) -> int:
    """At its largest; for a process of its own, where nothing else runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before = _memory_bytes("VmRSS")
    task()
    return _memory_bytes("VmHWM") - before


def _memory_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])
