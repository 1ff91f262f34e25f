"""A run of DistBelief that saves every so many steps, is stopped, and resumed. Times are those of its own records."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.checkpoint.figures import Save, Trace
from bench.recovery.watch import LAUNCH_LIMIT_S, started, wait_for
from bench.running import BENCH, Command
from distbelief.checkpoint.reading import list_checkpoints
from distbelief.coordinator.metricsfile import Tail

STEPS = 10_000_000
KEPT = 2
MEASURE_LIMIT_S = 900.0


@dataclass(frozen=True)
class Resumed:
    from_scratch_s: float
    """From the start of the command to the first step's commit."""
    resumed_s: float
    """The same, of a run that goes on from its checkpoint."""


class Records:
    """What a run has written about its steps and checkpoints so far."""

    def __init__(self, run_dir: Path) -> None:
        self.commits: list[float] = []
        self.saves: list[Save] = []
        self._tail = Tail(run_dir / "metrics.jsonl")

    def poll(self) -> None:
        for record in self._tail.read():
            if record["kind"] == "step":
                self.commits.append(record["at"])
            elif record["kind"] == "checkpoint":
                self.saves.append(Save(record["step"], record["pause_s"], record["at"], record["size_bytes"]))


def command(run_dir: Path, workers: int, every: int, width: int) -> Command:
    return [
        sys.executable, "-m", "distbelief.cli.main", "train", str(BENCH / "checkpoint" / "job.py"),
        "--workers", str(workers), "--threads", "1", "--run-dir", str(run_dir), "--json",
        "--save-every", str(every), "--keep-last", str(KEPT),
        "--set", f"steps={STEPS}", "--set", f"width={width}", "--set", f"shards={workers}",
    ]  # fmt: skip


def measure(train: Command, run_dir: Path, every: int, saves: int) -> tuple[Trace, Resumed]:
    """Train until so many saves are done, and so many steps more as lie between two; then stop, and resume."""
    records, began = Records(run_dir), time.time()
    with started(train, {}) as process:
        _wait(process, records, lambda: len(records.commits) > 0, LAUNCH_LIMIT_S, "the first step")
        _wait(
            process,
            records,
            lambda: len(records.commits) >= (saves + 1) * every,
            MEASURE_LIMIT_S,
            f"{saves} saves and the steps after them",
        )
        last = (saves + 1) * every
        trace = Trace(records.commits[:last], [save for save in records.saves if save.step < last])
    return trace, Resumed(trace.commits[0] - began, _resume(run_dir))


def _resume(run_dir: Path) -> float:
    """Seconds until the first step is committed. The records of steps after the checkpoint are taken away before, as
    if the run had died right then: a step that is done again is not recorded again."""
    saved = list_checkpoints(run_dir / "checkpoints")[0]
    metrics = run_dir / "metrics.jsonl"
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if not _is_step_after(line, saved)]
    metrics.write_text("".join(lines))
    records, began = Records(run_dir), time.time()
    records.poll()
    before = len(records.commits)
    resume = [sys.executable, "-m", "distbelief.cli.main", "resume", str(run_dir), "--json"]
    with started(resume, {}) as process:
        _wait(process, records, lambda: len(records.commits) > before, LAUNCH_LIMIT_S, "the first step after resuming")
    return records.commits[before] - began


def _is_step_after(line: str, saved: int) -> bool:
    record = json.loads(line)
    return bool(record["kind"] == "step" and record["step"] >= saved)


def _wait(
    process: subprocess.Popen[bytes], records: Records, found: Callable[[], bool], limit_s: float, what: str
) -> None:
    def look() -> bool | None:
        records.poll()
        return found() or None

    wait_for(process, look, limit_s, what)
