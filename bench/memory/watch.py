"""How much memory the processes of a run have had, read from outside: /proc tells, and nothing in them changes."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from distbelief.coordinator.journal import read as read_journal
from distbelief.coordinator.metricsfile import Tail

POLL_S = 0.02
LIMIT_S = 600.0
KIB = 1024


@dataclass
class Life:
    """One process. `peak_bytes` is kept by the kernel, which misses nothing; `samples` are looks at it."""

    peak_bytes: int = 0
    samples: list[tuple[float, int]] = field(default_factory=list)
    """(time, resident bytes)"""

    def look(self, pid: int) -> None:
        with contextlib.suppress(OSError, KeyError):  # it has ended
            now = _status(pid)
            self.peak_bytes = max(self.peak_bytes, now["VmHWM"])
            self.samples.append((time.time(), now["VmRSS"]))

    def highest(self, first: float, end: float) -> int:
        """Of the looks within a span of time."""
        return max((size for at, size in self.samples if first <= at < end), default=0)


@dataclass(frozen=True)
class Lives:
    """The workers of a run, by rank."""

    workers: list[Life]
    commits: list[float]
    """When each step was committed."""


def watch(process: subprocess.Popen[bytes], run_dir: Path) -> Lives:
    """Look at the workers of a run until it ends."""
    journal, lives, commits = run_dir / "journal.jsonl", dict[int, Life](), list[float]()
    tail, deadline = Tail(run_dir / "metrics.jsonl"), time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        if not lives and journal.exists():
            lives = {pid: Life() for pid in first_workers(journal)}
        for pid, life in lives.items():
            life.look(pid)
        commits += [record["at"] for record in tail.read() if record["kind"] == "step"]
        time.sleep(POLL_S)
    commits += [record["at"] for record in tail.read() if record["kind"] == "step"]
    return Lives(list(lives.values()), commits)


def first_workers(journal: Path) -> Iterator[int]:
    """Their processes, as soon as the journal of a run has them."""
    for record in read_journal(journal):
        if record["kind"] == "generation":
            yield from (member["pid"] for member in record["members"])
            return


def _status(pid: int) -> dict[str, int]:
    """The sizes in /proc/PID/status, in bytes."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value.split()[0]) * KIB
    return found
