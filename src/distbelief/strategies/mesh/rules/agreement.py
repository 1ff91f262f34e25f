"""Decides which state a new generation begins from. Pure.

The members tell each other which states they have (`StateReport`). The newest complete state wins. For each step, in
order: the state of the survivors, if together they still have all of it; then snapshots, each member's own and its
neighbour's. If no state is complete, a checkpoint or the job's initial values come next (`state/restore.py`). A worker
that missed some generations may report an old state, or a later one than the state that the others went back to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from distbelief.checkpoint.rules.boxes import Box
from distbelief.strategies.base import Applied
from distbelief.strategies.mesh.rules.boxes import Holding, first_incomplete

Origin = Literal["members", "snapshots", "outside"]


class CommitDecision(msgspec.Struct, frozen=True):
    """The result of the vote on a step: all that a member needs to apply the step."""

    step: int
    loss: float
    samples: int
    fingerprint: str
    generation: int
    at: float
    factor: float
    """The factor for every gradient: one over the batch's weight, times the clipping. 0: the step changes no
    parameter."""
    shards: int
    """The number of shards that had samples: buffers are averaged over them."""
    untouched: list[int] = []
    """The numbers of parameters to which no shard gave a gradient."""


class StateReport(msgspec.Struct, frozen=True):
    """The states that a member has, as it tells the others."""

    applied: int = -1
    """Steps applied to the member's state of the last generation; -1: it has none."""
    pending: int = -1
    """The step whose gradients are complete but not applied; -1: none."""
    last: CommitDecision | None = None
    """The decision on the last applied step."""
    boxes: dict[str, Box] = {}
    snapshots: list[tuple[int, dict[str, Box]]] = []
    """(step, boxes) of each snapshot in the worker's memory."""
    reached: int = 0
    """The highest number of applied steps that this member knows of."""
    history: list[Applied] = []
    """The results of the last steps."""
    note: tuple[int, bytes] = (-1, b"")


@dataclass(frozen=True)
class StateSource:
    """The source of the state, the same on every member."""

    origin: Origin
    step: int
    reached: int
    holdings: Sequence[Holding] = ()


def choose(reports: Sequence[StateReport], shapes: Mapping[str, Sequence[int]]) -> StateSource:
    """Choose the newest complete state. `shapes`: every tensor that a state consists of."""
    reached = max(report.reached for report in reports)
    steps = {report.applied for report in reports if report.applied >= 0}
    steps |= {step for report in reports for step, _ in report.snapshots}
    for step in sorted(steps, reverse=True):
        living = [Holding(r, p.boxes) for r, p in enumerate(reports) if can_reach(p, step, reports)]
        kept = [Holding(r, boxes) for r, p in enumerate(reports) for at, boxes in p.snapshots if at == step]
        origins: tuple[tuple[Origin, list[Holding]], ...] = ("members", living), ("snapshots", kept)
        for origin, held in origins:
            if held and not first_incomplete([one.boxes for one in held], shapes):
                return StateSource(origin, step, reached, held)
    return StateSource("outside", 0, reached)


def can_reach(report: StateReport, step: int, reports: Sequence[StateReport]) -> bool:
    """Whether a member has the state after `step` steps, or can make it by applying its pending step."""
    waits = report.applied == step - 1 and report.pending == step - 1
    return report.applied == step or (waits and decision_on(step - 1, reports) is not None)


def decision_on(step: int, reports: Sequence[StateReport]) -> CommitDecision | None:
    """The decision on a step. A member that has applied the step keeps the decision until its part is divided anew."""
    return next((p.last for p in reports if p.last is not None and p.last.step == step), None)


def merged_history(reports: Sequence[StateReport], applied: int) -> list[Applied]:
    """The results of the steps before `applied`, as far as any member knows them."""
    known = {one.step: one for report in reversed(reports) for one in report.history if one.step < applied}
    return [known[step] for step in sorted(known)]
