"""From what a run's processes told, and what was seen of them, to one measurement."""

from __future__ import annotations

import bisect
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.compare.launching import Ran
from bench.compare.system import System
from bench.running import DriverFailed
from bench.task import Task


@dataclass(frozen=True)
class Rank:
    ends: list[float]
    losses: list[float | None]
    evaluations: list[list[float]] = field(default_factory=list)
    """(when, steps done, right, of how many)"""
    peak_bytes: int = 0


@dataclass(frozen=True)
class Measurement:
    samples_per_s: float
    first_step_s: float
    """From the start of the first process to the end of the first step, on the last rank that had one."""
    losses: list[float]
    """Of every step, over all ranks that have one."""
    others: float
    """The share of the machine's processor time that others had."""
    peak_bytes: int
    """Of the largest worker."""
    wire_bytes_per_step: float | None
    accuracy: list[tuple[float, float]]
    """(seconds since the start, share that was right)"""
    weights_sha256: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measurement(system: System, task: Task, ran: Ran) -> Measurement:
    folder = Path(task.folder)
    sha256 = ""
    if system.kind == "ours":
        ranks, sha256 = [_ours(folder / "run", task, freely=system.asynchronous)], _sha256(folder / "output.txt")
    else:
        files = sorted(folder.glob("rank*.json"))
        ranks = [_rank(json.loads(file.read_text())) for file in files]
    if not ranks:
        raise DriverFailed("no rank has left a record")
    if short := [len(one.ends) for one in ranks if len(one.ends) != task.steps]:
        raise DriverFailed(f"a rank has recorded {short[0]} of {task.steps} steps")
    spans = [one.ends[-1] - one.ends[task.warm_up - 1] for one in ranks]
    timed = task.steps - task.warm_up
    if task.meet:  # on their own: speeds add up
        speed = sum(task.batch_per_worker * timed / span for span in spans)
    else:
        speed = task.global_batch * timed / max(spans)
    last = max(ranks, key=lambda one: one.ends[-1])
    return Measurement(
        samples_per_s=speed,
        first_step_s=max(one.ends[0] for one in ranks) - ran.began,
        losses=_mean_losses(ranks),
        others=ran.others,
        peak_bytes=max([ran.peak_bytes, *(one.peak_bytes for one in ranks)]),
        wire_bytes_per_step=wire_bytes(ran.wire, last.ends[task.warm_up - 1], last.ends[-1], timed),
        accuracy=_accuracies(ranks, ran.began),
        weights_sha256=sha256,
    )


def wire_bytes(looks: Sequence[tuple[float, int]], first: float, end: float, steps: int) -> float | None:
    """Bytes per step between two moments, from looks at a counter around them.

    >>> wire_bytes([(0.0, 0), (1.0, 100), (3.0, 300)], first=0.5, end=2.5, steps=4)
    50.0
    """
    if len(looks) < 2:
        return None
    return (_at(looks, end) - _at(looks, first)) / steps


def _at(looks: Sequence[tuple[float, int]], when: float) -> float:
    place = min(max(bisect.bisect_left(looks, (when, 0)), 1), len(looks) - 1)
    (before, low), (after, high) = looks[place - 1], looks[place]
    share = (when - before) / (after - before) if after > before else 1.0
    return low + min(max(share, 0.0), 1.0) * (high - low)


def _rank(told: dict[str, Any]) -> Rank:
    return Rank(told["ends"], told["losses"], told["evaluations"], told["peak_bytes"])


def _ours(run_dir: Path, task: Task, *, freely: bool) -> Rank:
    """The committed steps of a run's metrics. Where nobody waits, one update per worker is a step of the others."""
    each = task.workers if freely else 1
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    if [record["step"] for record in steps] != list(range(task.steps * each)):
        raise DriverFailed("metrics.jsonl does not hold all steps once each, in order")
    groups = [steps[first : first + each] for first in range(0, len(steps), each)]
    evaluations = [
        [record["at"], record["step"] // each, record["metrics"]["accuracy"], 1.0]
        for record in records
        if record["kind"] == "evaluation"
    ]
    losses: list[float | None] = [statistics.fmean(one["loss"] for one in group) for group in groups]
    return Rank([group[-1]["at"] for group in groups], losses, evaluations)


def _sha256(output: Path) -> str:
    """Of the object that `--json` prints last."""
    objects = [line for line in output.read_text().splitlines() if line.startswith("{")]
    if not objects:
        raise DriverFailed("the run has printed no result")
    return str(json.loads(objects[-1])["weights_sha256"])


def _mean_losses(ranks: Sequence[Rank]) -> list[float]:
    found = []
    for of_ranks in zip(*(one.losses for one in ranks), strict=True):
        there = [value for value in of_ranks if value is not None]
        if not there:
            raise DriverFailed("no rank has told the loss of a step")
        found.append(statistics.fmean(there))
    return found


def _accuracies(ranks: Sequence[Rank], began: float) -> list[tuple[float, float]]:
    """Known when the last rank has looked at its part."""
    return [
        (max(one[0] for one in parts) - began, sum(one[2] for one in parts) / sum(one[3] for one in parts))
        for parts in zip(*(one.evaluations for one in ranks), strict=True)
    ]
