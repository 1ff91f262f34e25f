"""What an engine is asked to run, and who watches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from distbelief.coordinator.detector import STUCK_S


class Observer(Protocol):
    """Whoever watches a run (see observe/view.py)."""

    def started(self, run_dir: Path, workers: int) -> None: ...

    def log(self, source: str, line: str) -> None: ...

    def refresh(self) -> None: ...


@dataclass(frozen=True)
class Launch:
    """What to run, and on how many workers."""

    run_dir: Path
    workers: int
    strategy: str
    exact: bool
    transport: str
    threads: int = 1
    device: str = "cpu"
    shares: tuple[float, ...] = ()
    job_file: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    job_pickle: bytes = b""
    sys_path: tuple[str, ...] = ()
    worker_threads: dict[int, int] = field(default_factory=dict)
    """Workers with another number of threads than the run's. In exact mode the canary refuses them."""
    min_workers: int = 1
    balance: bool = True
    stuck_after_s: float = STUCK_S
    listen: str = "tcp://127.0.0.1:*"
    """Where the coordinator listens. Beyond loopback, workers of other hosts can join."""
    dial: Callable[[int, str], str] = lambda worker, address: address
    """The address at which a worker reaches the coordinator: chaos puts itself in between."""
    most_steps: int = 0
    """End the run after so many steps, if the job has more; 0: no limit."""
