"""Whether the pieces of a tensor that lie in the parts hold every element of it exactly once. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from math import prod

import msgspec

from distbelief.checkpoint import boxes
from distbelief.checkpoint.boxes import Box


class Stretch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    part: int
    """1 for the first part."""
    first: int
    count: int
    box: Box | None = None
    """None: elements `first`, `first + 1`, … in row-major order. Otherwise the first and the number of those in it."""


def coverage_fault(name: str, shape: Sequence[int], stretches: Iterable[Stretch]) -> str:
    """Says where the stretches leave elements of a tensor out, or hold them twice; nothing when all is well.

    >>> coverage_fault("w", (2, 3), [Stretch(1, 0, 4), Stretch(2, 4, 2)])
    ''
    >>> coverage_fault("w", (2, 3), [Stretch(1, 0, 4), Stretch(2, 5, 1)])
    "elements 4 to 4 of tensor 'w' are in no part"
    >>> coverage_fault("w", (2, 3), [Stretch(1, 0, 2, ((0, 2), (0, 1))), Stretch(2, 2, 2, ((0, 2), (2, 3)))])
    "elements [0:2,1:2] of tensor 'w' are in no part"
    """
    held = list(stretches)
    if not any(stretch.box is not None for stretch in held):
        return _fault_of_stretches(name, shape, held)
    return _fault_of_pieces(name, shape, held) or _fault_of_boxes(name, shape, held)


def _fault_of_stretches(name: str, shape: Sequence[int], stretches: Iterable[Stretch]) -> str:
    reached, last_part, found = 0, 0, False
    for stretch in sorted(stretches, key=lambda s: (s.first, s.count)):
        found = True
        if stretch.first < 0 or stretch.count < (1 if prod(shape) else 0):
            return f"tensor '{name}' has a stretch of {stretch.count} elements from {stretch.first} on"
        if stretch.first > reached:
            return f"elements {reached} to {stretch.first - 1} of tensor '{name}' are in no part"
        if stretch.first < reached:
            upto = min(reached, stretch.first + stretch.count) - 1
            return f"elements {stretch.first} to {upto} of tensor '{name}' are {_both(last_part, stretch.part)}"
        reached, last_part = reached + stretch.count, stretch.part
    if any(size < 0 for size in shape) or reached > prod(shape):
        return f"tensor '{name}' of shape {shown_shape(shape)} is held with {reached} elements"
    if reached < prod(shape):
        return f"elements {reached} to {prod(shape) - 1} of tensor '{name}' are in no part"
    return "" if found else f"tensor '{name}' is in no part"


def _fault_of_pieces(name: str, shape: Sequence[int], stretches: Iterable[Stretch]) -> str:
    """What is wrong with one of them by itself."""
    of = f"tensor '{name}' of shape {shown_shape(shape)}"
    for stretch in stretches:
        if stretch.box is None:
            if stretch.first < 0 or stretch.count < 1 or stretch.first + stretch.count > prod(shape):
                return f"{of} has a stretch of {stretch.count} elements from {stretch.first} on"
            continue
        shown = boxes.shown(stretch.box)
        if len(stretch.box) != len(shape):
            return f"{of} has a box of {len(stretch.box)} dimensions: {shown}"
        if not boxes.is_box_of(shape, stretch.box):
            return f"{of} has a box that lies outside of it: {shown}"
        if not stretch.count or stretch.count != boxes.volume(stretch.box):
            return f"{of} has the box {shown} with {stretch.count} elements"
        if stretch.first != boxes.first_of(shape, stretch.box):
            return f"{of} has the box {shown} from element {stretch.first} on"
    return ""


def _fault_of_boxes(name: str, shape: Sequence[int], stretches: Iterable[Stretch]) -> str:
    pieces = [
        (box, stretch.part)
        for stretch in stretches
        for box in ([stretch.box] if stretch.box is not None else boxes.boxes_of(shape, stretch.first, stretch.count))
    ]
    fault = _not_once(shape, pieces, ())
    if fault is None:
        return ""
    where, parts = fault
    held = _both(*parts[:2]) if parts else "in no part"
    return f"elements {boxes.shown(where)} of tensor '{name}' are {held}"


def _not_once(shape: Sequence[int], pieces: Sequence[tuple[Box, int]], upto: Box) -> tuple[Box, Sequence[int]] | None:
    """The first box that is not held exactly once, and the parts that hold it; one dimension after the other."""
    dimension = len(upto)
    rest = boxes.whole(shape[dimension:])
    if not pieces:
        return (*upto, *rest), []
    if len(pieces) == 1 and pieces[0][0][dimension:] == rest:
        return None
    if not rest:
        return upto, [part for _, part in pieces]
    cuts = sorted({0, shape[dimension], *itertools.chain.from_iterable(box[dimension] for box, _ in pieces)})
    for start, end in itertools.pairwise(cuts):
        here = [(box, part) for box, part in pieces if box[dimension][0] <= start and end <= box[dimension][1]]
        if fault := _not_once(shape, here, (*upto, (start, end))):
            return fault
    return None


def _both(one: int, other: int) -> str:
    return f"in part {one} and in part {other}" if one != other else "twice in a part"


def shown_shape(shape: Sequence[int]) -> str:
    """
    >>> shown_shape((10, 20)), shown_shape(())
    ('10×20', 'scalar')
    """
    return "×".join(map(str, shape)) or "scalar"
