"""Folds the records of a run (metrics.jsonl) into the state that a view shows.

`advance` is a pure fold: it reads no clock and opens no file; times come from the records. `Follower` reads the growing
files.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distbelief.coordinator.metricsfile import NAME, RECENT_BYTES, Record, Tail, last_evaluation_and_checkpoint

WINDOW_STEPS = 64
"""Speed is the median over this number of steps: long enough to ignore an evaluation, short enough to show a change."""
WINDOW_S = 10.0
"""A worker's shares of time are taken over this number of seconds, by the records' times."""
SMOOTHING = 0.9
_MOST_LOGGED = 100
CLEARLY_SLOWER = 1.10
"""Below this ratio to the other workers, the slowest worker is slow by chance and is not named."""


@dataclass(frozen=True)
class WorkerLoad:
    """One worker's recent load: fractions of its time, and its compute seconds per shard."""

    worker: int
    host: str
    first: int
    end: int
    step: int
    data: float = 0.0
    compute: float = 0.0
    comm: float = 0.0
    shard_s: float | None = None
    place: str = ""
    """The worker's part of a divided model: "stage 2/4"."""
    pace: str = ""
    """How often the worker pushes and fetches, if it adapts that: "4/2"."""
    waiting: float = 0.0
    """The fraction of its time in which the worker waits for others (pipeline bubbles); a part of `comm`."""
    waits_for: int | None = None
    """The worker for which it has waited longest."""


@dataclass(frozen=True)
class Slowest:
    worker: int
    excess: float
    """0.23: the worker needs 23 % more time for a shard than the median of the others."""


@dataclass(frozen=True)
class Interval:
    """The time from one commit to the next."""

    seconds: float
    samples: int
    steps: int = 1
    """The number of steps that were committed together."""


@dataclass(frozen=True)
class Progress:
    """The state of a run, as a view shows it."""

    name: str = ""
    strategy: str = ""
    total: int | None = None
    step: int = 0
    """Committed steps."""
    loss: float | None = None
    smoothed: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_step: int | None = None
    saved_step: int | None = None
    """The step of the newest checkpoint."""
    at: float | None = None
    """The time of the last commit."""
    intervals: tuple[Interval, ...] = ()
    generation: int | None = None
    snapshots: tuple[tuple[float, Mapping[int, Record]], ...] = ()
    """Recent (time, worker -> cumulative timings) of this generation, oldest first."""
    workers: tuple[WorkerLoad, ...] = ()
    notice: str = ""
    """The last one."""

    @property
    def samples_per_s(self) -> float | None:
        rates = [interval.samples / interval.seconds for interval in self.intervals]
        return statistics.median(rates) if rates else None

    @property
    def remaining_s(self) -> float | None:
        if self.total is None or not self.intervals:
            return None
        return (self.total - self.step) * statistics.median(one.seconds / one.steps for one in self.intervals)

    @property
    def slowest(self) -> Slowest | None:
        return find_slowest(self.workers)


def advance(progress: Progress, record: Record) -> Progress:
    """Fold one record in. Unknown kinds are ignored, so that an older view can follow a newer run."""
    match record.get("kind"):
        case "step":
            return _step(progress, record)
        case "evaluation":
            return replace(progress, metrics=dict(record["metrics"]), metrics_step=record["step"])
        case "checkpoint":
            return replace(progress, saved_step=int(record["step"]))
        case "workers":
            return _workers(progress, record)
        case "notice" | "unreadable":
            return replace(progress, notice=str(record["text"]))
    return progress


def describe(progress: Progress, job: Mapping[str, Any]) -> Progress:
    """Add the facts of job.json, which are known before the first step."""
    name, strategy = str(job.get("name", "")), str(job.get("strategy", ""))
    return replace(progress, name=name, strategy=strategy, total=job.get("steps"))


def find_slowest(workers: tuple[WorkerLoad, ...]) -> Slowest | None:
    """The worker that needs the most time for a shard, if it is clearly slower than the others."""
    timed = sorted(
        ((load.shard_s, load.worker) for load in workers if load.shard_s is not None),
        key=lambda pair: pair[0],
    )
    if len(timed) < 2:
        return None
    worst, worker = timed[-1]
    others = statistics.median(seconds for seconds, _ in timed[:-1])
    if others <= 0 or worst / others <= CLEARLY_SLOWER:
        return None
    return Slowest(worker, worst / others - 1)


def _step(progress: Progress, record: Record) -> Progress:
    step, at = int(record["step"]) + 1, float(record["at"])  # the record names step t; t + 1 are committed
    loss = math.nan if record["loss"] is None else float(record["loss"])  # JSON has no NaN
    smoothed = progress.smoothed
    if math.isfinite(loss):
        smoothed = loss if smoothed is None else SMOOTHING * smoothed + (1 - SMOOTHING) * loss
    intervals = progress.intervals
    # A repeated step, a gap, or a clock that was set back gives no measurement.
    if progress.at is not None and step == progress.step + 1 and at > progress.at:
        intervals = (*intervals, Interval(at - progress.at, int(record["samples"])))[-WINDOW_STEPS:]
    elif intervals and step == progress.step + 1 and at == progress.at:  # committed together with the one before it
        last = intervals[-1]
        intervals = (*intervals[:-1], Interval(last.seconds, last.samples + int(record["samples"]), last.steps + 1))
    return replace(progress, step=step, loss=loss, smoothed=smoothed, at=at, intervals=intervals)


def _workers(progress: Progress, record: Record) -> Progress:
    at, generation = float(record["at"]), int(record["generation"])
    now: Mapping[int, Record] = {int(worker["worker"]): worker for worker in record["workers"]}
    # Timings start from zero in each generation, so a new one has no earlier snapshot to compare with.
    snapshots = (*(progress.snapshots if generation == progress.generation else ()), (at, now))
    while len(snapshots) > 2 and snapshots[1][0] <= at - WINDOW_S:
        snapshots = snapshots[1:]
    before: Mapping[int, Record] = snapshots[0][1] if len(snapshots) > 1 else {}
    divided = any(worker.get("place") for worker in now.values())
    order = now if divided else sorted(now)  # by their places, if they have any: as they are in the record
    loads = tuple(_load(now[number], before.get(number, {})) for number in order)
    return replace(progress, generation=generation, snapshots=snapshots, workers=loads)


def _load(now: Record, before: Record) -> WorkerLoad:
    def since(name: str) -> float:
        return max(float(now[name]) - float(before.get(name, 0)), 0.0)

    data_s, compute_s, comm_s, shards = since("data_s"), since("compute_s"), since("comm_s"), since("shards")
    waits = _waits(now, before)
    whole = data_s + compute_s + comm_s
    if not whole and before:  # no progress lately: show the whole generation instead of zeros
        return _load(now, {})
    whole = whole or 1.0
    return WorkerLoad(
        worker=int(now["worker"]),
        host=str(now["host"]),
        first=int(now["first"]),
        end=int(now["end"]),
        step=int(now["step"]),
        data=data_s / whole,
        compute=compute_s / whole,
        comm=comm_s / whole,
        shard_s=compute_s / shards if shards else None,
        place=str(now.get("place", "")),
        pace="/".join(str(number) for number in now.get("pace", ())),
        waiting=min(sum(waits.values()) / whole, 1.0),
        waits_for=max(waits, key=lambda worker: waits[worker], default=None),
    )


def _waits(now: Record, before: Record) -> dict[int, float]:
    """Waiting time in seconds, by the worker waited for; JSON stores worker numbers as text."""
    earlier = before.get("waits", {})
    since = {int(worker): float(s) - float(earlier.get(worker, 0.0)) for worker, s in now.get("waits", {}).items()}
    return {worker: s for worker, s in since.items() if s > 0}


def _parse(content: bytes) -> Record | None:
    """The record, or None while the file is still being written."""
    try:
        record = json.loads(content)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class Follower:
    """Follows a run directory: gives each new record with the progress after it. Of a long run that it did not follow
    from the start it reads the end only, and the last evaluation and checkpoint."""

    def __init__(self, run_dir: Path) -> None:
        self.progress = Progress()
        self._metrics = run_dir / NAME
        self._tail = Tail(self._metrics, RECENT_BYTES)
        self._job = run_dir / "job.json"
        self._described = False
        self._logged: deque[str] = deque(maxlen=_MOST_LOGGED)
        self._unreadable: list[Record] = []
        """What could not be read while catching up: it is news for a view."""

    def catch_up(self) -> Progress:
        """Read what shows the present state."""
        for record in last_evaluation_and_checkpoint(self._metrics):
            with contextlib.suppress(KeyError, TypeError, ValueError):  # a damaged line
                self.progress = advance(self.progress, record)
        self._unreadable = [record for record, _ in self.poll() if record.get("kind") == "unreadable"]
        return self.progress

    def poll(self) -> Iterator[tuple[Record, Progress]]:
        if not self._described:
            self._describe()
        while found := self._unreadable + self._tail.read():
            self._unreadable = []
            for record in found:
                try:
                    self.progress = advance(self.progress, record)
                except (KeyError, TypeError, ValueError, AttributeError):
                    continue  # a damaged line, as one that is no JSON
                if record.get("kind") != "notice" or not self._was_logged(self.progress.notice):
                    yield record, self.progress

    def logged(self, source: str, line: str) -> None:
        """A view has shown this line of a process. A coordinator without room on its disk prints its notices too, and
        they come again among the records when there is room."""
        if source == "coordinator":
            self._logged.append(line.removeprefix("coordinator: ").rstrip())

    def _was_logged(self, notice: str) -> bool:
        first = notice.partition("\n")[0].removeprefix("the coordinator: ").rstrip()
        if first not in self._logged:
            return False
        self._logged.remove(first)
        return True

    def _describe(self) -> None:
        try:
            job = _parse(self._job.read_bytes())
        except OSError:  # not there yet, or only its owner may read it
            return
        if job is not None:  # otherwise the file is still being written
            self.progress = describe(self.progress, job)
            self._described = True
