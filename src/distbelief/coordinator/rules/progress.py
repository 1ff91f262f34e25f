"""Progress: turns heartbeats into metrics lines, each step and each evaluation once. It decides nothing.

A member may repeat reports. The last REMEMBERED reported steps are remembered, so that a run of a million steps costs
no more than a short one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distbelief.control.messages import Heartbeat, Member, StepReport, Timing
from distbelief.coordinator.rules.paged import Paged

Line = dict[str, Any]

REMEMBERED = 1024
WORKERS_LINE_EVERY_S = 1.0
WORKERS_PER_S = 50
"""Beyond this number of members their lines come less often: a thousand members' take as much disk as fifty's."""


@dataclass(frozen=True)
class Seen:
    """Step -> the reported value. Steps below `floor` are forgotten and count as reported."""

    values: Mapping[int, str] = field(default_factory=dict)
    floor: int = 0

    @property
    def complete(self) -> int:
        """All steps before this one were reported."""
        step = self.floor
        while step in self.values:
            step += 1
        return step

    def before(self, step: int) -> Seen:
        """These reports without `step` and later steps, which may be reported again."""
        return Seen({one: value for one, value in self.values.items() if one < step}, min(self.floor, step))

    def add(self, reports: Sequence[tuple[int, str]], last: bool = False) -> tuple[Seen, list[bool], list[str | None]]:
        """For each (step, value): whether it is new, and the different value reported before for that step, if any.
        `last`: a different value counts as new and replaces the earlier value."""
        values, floor = dict(self.values), self.floor
        fresh: list[bool] = []
        conflicts: list[str | None] = []
        for step, value in reports:
            known = values.get(step)
            conflicts.append(known if known is not None and known != value else None)
            fresh.append((known is None and step >= floor) or (last and conflicts[-1] is not None))
            if fresh[-1]:
                values[step] = value
                if len(values) > REMEMBERED:
                    oldest = next(iter(values))
                    del values[oldest]
                    floor = max(floor, oldest + 1)
        return Seen(values, floor), fresh, conflicts


@dataclass(frozen=True)
class Progress:
    steps: Paged[int] = field(default_factory=Paged)
    """Worker -> steps it has applied."""
    timings: Paged[Timing] = field(default_factory=Paged)
    reported: Seen = field(default_factory=Seen)
    evaluated: Seen = field(default_factory=Seen)
    committed_in: int = 0
    """The latest generation that is known to have committed a step."""
    redone: int = 0
    """Steps before this one were executed before, and lost."""
    lined_at: float = -math.inf
    """When the last workers line was made."""


def forget(progress: Progress, step: int, reached: int) -> Progress:
    """The run goes back to the state after `step` steps: later steps are reported again."""
    return replace(
        progress,
        reported=progress.reported.before(step),
        evaluated=progress.evaluated.before(step + 1),  # an evaluation names the steps that were applied
        redone=max(progress.redone, reached),
    )


def absorb(
    progress: Progress, members: Sequence[Member], beat: Heartbeat, now: float, exact: bool = True
) -> tuple[Progress, list[Line]]:
    """Process one member's heartbeat; returns its metrics lines in order."""
    progress = replace(
        progress,
        steps=progress.steps.set(beat.worker, beat.step),
        timings=progress.timings.set(beat.worker, beat.timing),
    )
    progress, lines = absorb_results(progress, beat, now, exact)
    if now - progress.lined_at >= max(WORKERS_LINE_EVERY_S, len(members) / WORKERS_PER_S):
        lines.append(workers_line(progress, members, beat.generation, now))
        progress = replace(progress, lined_at=now)
    return progress, lines


def absorb_results(progress: Progress, beat: Heartbeat, now: float, exact: bool = True) -> tuple[Progress, list[Line]]:
    """The steps and evaluations that a heartbeat reports. In inexact runs a step with another result than before was
    executed again, and its last report counts."""
    lines: list[Line] = []
    if beat.reports:
        reported, fresh, conflicts = progress.reported.add(
            [(r.step, r.fingerprint) for r in beat.reports], last=not exact
        )
        latest = max(report.generation for report in beat.reports)
        progress = replace(progress, reported=reported, committed_in=max(progress.committed_in, latest))
        for report, new, other in zip(beat.reports, fresh, conflicts, strict=True):
            if new:
                lines.append(_step_line(report))
            elif other is not None:
                lines.append(notice(_conflict(report, other), now))
    if beat.evaluations:
        evaluated, fresh, _ = progress.evaluated.add([(e.step, "") for e in beat.evaluations])
        progress = replace(progress, evaluated=evaluated)
        lines += [
            {"kind": "evaluation", "step": e.step, "metrics": e.metrics, "at": now}
            for e, new in zip(beat.evaluations, fresh, strict=True)
            if new
        ]
    return progress, lines


def workers_line(progress: Progress, members: Sequence[Member], generation: int, now: float) -> Line:
    """How each member spent its time, from its latest heartbeat."""
    return {
        "kind": "workers",
        "at": now,
        "generation": generation,
        # A step is committed as soon as one member has applied it.
        "step": max((progress.steps.get(member.worker, 0) for member in members), default=0),
        "workers": [_worker(progress, members, member) for member in members],
    }


def helped(progress: Progress, members: Sequence[Member]) -> int:
    """The number of shards that members have computed for late members."""
    return sum(progress.timings.get(member.worker, Timing()).helped for member in members)


def paces(progress: Progress, members: Sequence[Member], names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Each member's pace, if members choose it themselves. `names`: of its numbers."""
    found = {member.worker: progress.timings.get(member.worker, Timing()).pace for member in members}
    chosen = {worker: pace for worker, pace in found.items() if pace and len(pace) == len(names)}
    return {str(worker): dict(zip(names, pace, strict=True)) for worker, pace in chosen.items()}


def notice(text: str, now: float) -> Line:
    return {"kind": "notice", "text": text, "at": now}


def _worker(progress: Progress, members: Sequence[Member], member: Member) -> Line:
    timing = progress.timings.get(member.worker, Timing())
    line: Line = {
        "worker": member.worker,
        "host": member.host,
        "first": member.shards[0],
        "end": member.shards[1],
        "step": progress.steps.get(member.worker, 0),
        "data_s": round(timing.data_s, 4),
        "compute_s": round(timing.compute_s, 4),
        "comm_s": round(timing.comm_s, 4),
        "shards": timing.shards,
    }
    if member.place:
        line["place"] = member.place
    if timing.pace:
        line["pace"] = timing.pace
    if timing.helped:
        line["helped"] = timing.helped
    if timing.plain_bytes:
        line["wire_ratio"] = timing.wire_bytes / timing.plain_bytes
    if timing.waits:  # ranks are other workers in the next generation
        line["waits"] = {
            members[rank].worker: round(s, 4) for rank, s in timing.waits.items() if 0 <= rank < len(members)
        }
    return line


def _step_line(report: StepReport) -> Line:
    return {
        "kind": "step",
        "step": report.step,
        "loss": report.loss,
        "samples": report.samples,
        "fingerprint": report.fingerprint,
        "generation": report.generation,
        "at": report.at,
    }


def _conflict(report: StepReport, other: str) -> str:
    return (
        f"step {report.step} was reported twice with different results: fingerprint {other} first, "
        f"then {report.fingerprint}"
    )
