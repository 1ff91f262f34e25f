"""The view for pipes, files and batch systems: prints whole lines and never moves the cursor."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from distbelief.coordinator.metricsfile import Record
from distbelief.observe import text
from distbelief.observe.records import Follower, Progress, WorkerLoad

EVERY_S = 2.0
"""At most one step line per this number of seconds, by the records' times."""


class PlainView:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._follower: Follower | None = None
        self._shown_step = 0
        self._shown_at = float("-inf")
        self._closed = False

    def started(self, run_dir: Path, workers: int) -> None:
        self._follower = Follower(run_dir)
        self._shown_step = self._follower.catch_up().step  # of a resumed run, only new steps are shown
        self._print(f"{text.count(workers, 'worker')}, run directory {run_dir}")

    def log(self, source: str, line: str) -> None:
        if self._follower is not None:
            self._follower.logged(source, line)
        self._print(f"[{source}] {text.last_line(line)}")

    def refresh(self) -> None:
        if self._follower is not None:
            for record, progress in self._follower.poll():
                self._show(record, progress)

    def close(self) -> None:
        self.refresh()
        if self._follower is not None and self._shown_step != self._follower.progress.step:
            self._show_step(self._follower.progress)
        if self._follower is not None and not self._closed:
            self._closed = True
            for load in self._follower.progress.workers:
                if load.place:
                    self._print(place_line(load))

    def _show(self, record: Record, progress: Progress) -> None:
        match record.get("kind"):
            case "step":
                at = float(record["at"])
                if at - self._shown_at >= EVERY_S or at < self._shown_at or progress.step == progress.total:
                    self._show_step(progress)
            case "evaluation":
                if self._shown_step != progress.step:
                    self._show_step(progress)
                self._print(evaluation_line(progress))
            case "checkpoint":
                self._print(checkpoint_line(record))
            case "notice" | "unreadable":
                self._print(progress.notice)

    def _show_step(self, progress: Progress) -> None:
        self._shown_step = progress.step
        self._shown_at = progress.at if progress.at is not None else self._shown_at
        self._print(step_line(progress))

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def step_line(progress: Progress) -> str:
    """ "step 120/400  loss 0.2134  1,234 samples/s  worker 1 slowest (+23 %)" """
    total = "" if progress.total is None else f"/{progress.total}"
    parts = [f"step {progress.step}{total}", f"loss {text.number(progress.loss)}"]
    if progress.samples_per_s is not None:
        parts.append(text.rate(progress.samples_per_s))
    if progress.slowest is not None:
        parts.append(f"worker {progress.slowest.worker} slowest (+{text.percent(progress.slowest.excess)})")
    return "  ".join(parts)


def place_line(load: WorkerLoad) -> str:
    """ "worker 2  stage 3/4  compute 62 %  data 1 %  waits 31 %, mostly for worker 0" """
    parts = [f"worker {load.worker}", load.place, f"compute {text.percent(load.compute)}"]
    return "  ".join([*parts, f"data {text.percent(load.data)}", text.waiting(load.waiting, load.waits_for)])


def evaluation_line(progress: Progress) -> str:
    """ "evaluation at step 100: accuracy 0.9712, loss 0.1034" """
    values = ", ".join(f"{name} {text.number(value)}" for name, value in text.metrics(progress.metrics))
    return f"evaluation at step {progress.metrics_step}: {values}"


def checkpoint_line(record: Record) -> str:
    """ "checkpoint of step 500: 12.3 MB, training paused for 2 ms" """
    size, pause_ms = float(record["size_bytes"]) / 1e6, float(record["pause_s"]) * 1e3
    return f"checkpoint of step {record['step']}: {size:,.1f} MB, training paused for {pause_ms:,.0f} ms"
