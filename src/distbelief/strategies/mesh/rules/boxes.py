"""Decides how boxes of tensors get from the members that hold them to the members that want them. Pure.

A member holds boxes (`checkpoint/rules/boxes.py`) of named tensors. Checkpoints, new plans and snapshots all ask
which member holds which box.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from distbelief.checkpoint.rules.boxes import Box, common, volume, whole


@dataclass(frozen=True)
class Move:
    """A transfer of a box of a tensor from one member to another, or to the same member."""

    tensor: str
    box: Box
    holding: int
    """The number of the holding that gives the box."""
    source: int
    target: int


@dataclass(frozen=True)
class Holding:
    """The boxes that a member has of one state. A member may have several holdings: its own, and a copy of its
    neighbour's."""

    rank: int
    boxes: Mapping[str, Box]


class Missing(Exception):
    """No member holds this part of this tensor."""

    def __init__(self, tensor: str) -> None:
        super().__init__(tensor)
        self.tensor = tensor


def moves(held: Sequence[Holding], wanted: Sequence[Mapping[str, Box]]) -> list[Move]:
    """The transfers after which every member has the boxes that it wants (`wanted` is by rank). Raises Missing.

    A member takes boxes from itself first; for the rest, members that hold the same box take turns in giving. Boxes of
    one plan are equal or disjoint. They may overlap if some members have their parts of a new plan already, and others
    still have the parts of the old plan.

    >>> for move in moves([Holding(0, {"w": ((0, 2),)}), Holding(1, {"w": ((2, 4),)})], [{"w": ((1, 4),)}, {}]):
    ...     print(move.box, "from", move.source, "to", move.target)
    ((1, 2),) from 0 to 0
    ((2, 4),) from 1 to 0
    """
    holders: dict[str, dict[Box, list[int]]] = {}
    for number, holding in enumerate(held):
        for name, box in holding.boxes.items():
            holders.setdefault(name, {}).setdefault(box, []).append(number)
    found: list[Move] = []
    for target, boxes in enumerate(wanted):
        for name, box in boxes.items():
            missing = [box] if volume(box) else []
            own = [number for number, one in enumerate(held) if one.rank == target and name in one.boxes]
            givers = [(held[number].boxes[name], [number]) for number in own]
            for theirs, numbers in [*givers, *holders.get(name, {}).items()]:
                for shared in [part for one in missing if (part := common(one, theirs)) is not None]:
                    number = numbers[len(found) % len(numbers)]
                    found.append(Move(name, shared, number, held[number].rank, target))
                missing = [rest for one in missing for rest in without(one, theirs)]
            if missing:
                raise Missing(name)
    return found


def without(box: Box, other: Box) -> list[Box]:
    """The rest of a box outside of another box, as boxes.

    >>> without(((0, 4), (0, 4)), ((1, 2), (2, 9)))
    [((0, 1), (0, 4)), ((2, 4), (0, 4)), ((1, 2), (0, 2))]
    """
    shared = common(box, other)
    if shared is None:
        return [box]
    found: list[Box] = []
    for dimension, ((start, end), (low, high)) in enumerate(zip(box, shared, strict=True)):
        sides = [side for side in ((start, low), (high, end)) if side[0] < side[1]]
        found += [(*shared[:dimension], side, *box[dimension + 1 :]) for side in sides]
    return found


def first_incomplete(held: Iterable[Mapping[str, Box]], shapes: Mapping[str, Sequence[int]]) -> str:
    """The name of the first incomplete tensor; "" if all tensors are complete."""
    there: dict[str, set[Box]] = {}
    for boxes in held:
        for name, box in boxes.items():
            there.setdefault(name, set()).add(box)
    for name, shape in shapes.items():
        missing = [whole(shape)] if prod(shape) else []
        for box in there.get(name, ()):
            missing = [rest for one in missing for rest in without(one, box)]
        if missing:
            return name
    return ""


def writers(held: Sequence[Mapping[str, Box]]) -> list[set[str]]:
    """The tensors whose boxes each member writes to a checkpoint, by rank. Members that hold the same box take turns.

    >>> writers([{"a": ((0, 2),), "b": ()}, {"a": ((0, 2),), "b": ()}])
    [{'a'}, {'b'}]
    """
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, boxes in enumerate(held):
        for name, box in boxes.items():
            if volume(box):
                holders.setdefault((name, box), []).append(rank)
    mine: list[set[str]] = [set() for _ in held]
    for turn, ((name, _), ranks) in enumerate(holders.items()):
        mine[ranks[turn % len(ranks)]].add(name)
    return mine
