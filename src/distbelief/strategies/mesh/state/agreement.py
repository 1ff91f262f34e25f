"""What the members of a new generation do before their first step: agree on a state, and get their parts of it.

The newest that is whole: the state of the survivors, if they still have all of it between them; snapshots, each
member's own and those that its neighbour keeps of it; then a checkpoint; then the job's initial values. A worker that
was not in the last generations may tell of a state that is old, or later than one that the others went back to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from distbelief.checkpoint.boxes import Box
from distbelief.strategies.base import Applied
from distbelief.strategies.mesh.rules.boxes import Holding, covered, moves
from distbelief.strategies.mesh.state.livestate import LiveState, Verdict
from distbelief.strategies.mesh.state.moving import Pieces, move_all
from distbelief.transport.gloo.group import TorchGroup

Origin = Literal["members", "snapshots", "outside"]


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


def tell(group: TorchGroup, position: Position) -> list[Position]:
    decoder = msgspec.msgpack.Decoder(Position)
    return [decoder.decode(theirs) for theirs in group.gather(msgspec.msgpack.encode(position))]


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


def catch_up(state: LiveState, positions: Sequence[Position], top: int) -> None:
    """Apply the step that others have applied and this member was called away from."""
    verdict = _verdict_on(top - 1, positions)
    if verdict is not None and state.applied == top - 1 and state.pending == top - 1:
        state.apply(verdict)


def fetch(
    group: TorchGroup, choice: Choice, own: Sequence[Pieces], wanted: Sequence[Mapping[str, Box]], into: Pieces
) -> None:
    """Move the chosen state to where it is wanted. `own`: what this member has of it, in the order that it told."""
    numbers = [number for number, holding in enumerate(choice.holdings) if holding.rank == group.rank]
    mine = dict(zip(numbers, own, strict=True))
    move_all(group, moves(choice.holdings, wanted), mine, into)


def merged_history(positions: Sequence[Position], applied: int) -> list[Applied]:
    """What the steps before that one gave, as far as anybody knows it."""
    known = {one.step: one for position in reversed(positions) for one in position.history if one.step < applied}
    return [known[step] for step in sorted(known)]
