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

from distbelief.checkpoint.boxes import Box
from distbelief.strategies.base import Applied
from distbelief.strategies.mesh.rules.boxes import Holding, covered

Origin = Literal["members", "snapshots", "outside"]


class Verdict(msgspec.Struct, frozen=True):
    """What the vote on a step has given: all that is needed to apply it."""

    step: int
    loss: float
    samples: int
    fingerprint: str
    generation: int
    at: float
    factor: float
    """On every gradient: one over the batch's weight, and clipping. 0: no parameter is touched."""
    shards: int
    """That had samples: buffers are averaged over them."""
    untouched: list[int] = []
    """The numbers of parameters to which no shard gave a gradient."""


class Position(msgspec.Struct, frozen=True):
    """What a member tells the others of the states that it has."""

    applied: int = -1
    """-1: none."""
    pending: int = -1
    last: Verdict | None = None
    boxes: dict[str, Box] = {}
    snapshots: list[tuple[int, dict[str, Box]]] = []
    reached: int = 0
    """The most steps that this member knows of."""
    history: list[Applied] = []
    """What its last steps gave."""
    note: tuple[int, bytes] = (-1, b"")


@dataclass(frozen=True)
class Choice:
    """Where the state comes from. The same on every member."""

    origin: Origin
    step: int
    reached: int
    holdings: Sequence[Holding] = ()


def choose(positions: Sequence[Position], shapes: Mapping[str, Sequence[int]]) -> Choice:
    """Pure. `shapes`: every tensor that the state consists of."""
    reached = max(position.reached for position in positions)
    steps = {position.applied for position in positions if position.applied >= 0}
    steps |= {step for position in positions for step, _ in position.snapshots}
    for step in sorted(steps, reverse=True):
        living = [Holding(r, p.boxes) for r, p in enumerate(positions) if will_have(p, step, positions)]
        kept = [Holding(r, boxes) for r, p in enumerate(positions) for at, boxes in p.snapshots if at == step]
        origins: tuple[tuple[Origin, list[Holding]], ...] = ("members", living), ("snapshots", kept)
        for origin, held in origins:
            if held and not covered([one.boxes for one in held], shapes):
                return Choice(origin, step, reached, held)
    return Choice("outside", 0, reached)


def will_have(position: Position, step: int, positions: Sequence[Position]) -> bool:
    """Whether a member has the state after so many steps, or can make it by itself."""
    waits = position.applied == step - 1 and position.pending == step - 1
    return position.applied == step or (waits and _verdict_on(step - 1, positions) is not None)


def _verdict_on(step: int, positions: Sequence[Position]) -> Verdict | None:
    """Who has applied a step keeps the verdict on it until its part is divided anew."""
    return next((p.last for p in positions if p.last is not None and p.last.step == step), None)


def merged_history(positions: Sequence[Position], applied: int) -> list[Applied]:
    """What the steps before that one gave, as far as anybody knows it."""
    known = {one.step: one for position in reversed(positions) for one in position.history if one.step < applied}
    return [known[step] for step in sorted(known)]
