"""Boxes of a tensor, and whether the pieces of a checkpoint cover it. Pure geometry.

A box is (start, end) for each dimension; () is all of a tensor with one element. The elements of a tensor also have
an order, row after row. A stretch of that order is a few boxes (`boxes_of`), and some boxes are one stretch
(`stretch_of`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import msgspec

Box = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def sizes(box: Box) -> tuple[int, ...]:
    return tuple(end - start for start, end in box)


def volume(box: Box) -> int:
    return prod(sizes(box))


def common(one: Box, other: Box) -> Box | None:
    """The intersection of two boxes of one tensor; None if it is empty.

    >>> common(((0, 4), (0, 2)), ((2, 8), (1, 2)))
    ((2, 4), (1, 2))
    >>> common((), ())
    ()
    """
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < end for start, end in both) else None


def within(box: Box, holder: Box) -> Box:
    """A box relative to the corner of a box that contains it.

    >>> within(((2, 4),), ((1, 9),))
    ((1, 3),)
    """
    return tuple((start - low, end - low) for (start, end), (low, _) in zip(box, holder, strict=True))


def inside(box: Box, holder: Box) -> tuple[slice, ...]:
    """The slices of a box in a tensor that holds the surrounding box `holder`."""
    return tuple(slice(start, end) for start, end in within(box, holder))


def is_box_of(shape: Sequence[int], box: Box) -> bool:
    return len(box) == len(shape) and all(
        0 <= start <= end <= size for (start, end), size in zip(box, shape, strict=True)
    )


def shown(box: Box) -> str:
    """
    >>> shown(((0, 4), (2, 6)))
    '[0:4,2:6]'
    """
    return f"[{','.join(f'{start}:{end}' for start, end in box)}]"


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The distance between neighbours in row-major order, for each dimension.

    >>> strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def first_of(shape: Sequence[int], box: Box) -> int:
    """The index of a box's first element in row-major order."""
    return sum(start * stride for (start, _), stride in zip(box, strides(shape), strict=True))


def stretch_of(shape: Sequence[int], box: Box) -> tuple[int, int] | None:
    """First element and number of elements of a box that is a single stretch; None for other boxes.

    >>> stretch_of((4, 6), ((1, 3), (0, 6)))
    (6, 12)
    >>> stretch_of((4, 6), ((1, 2), (2, 4)))
    (8, 2)
    >>> stretch_of((4, 6), ((1, 3), (2, 4))) is None
    True
    """
    first_wide = next((k for k, size in enumerate(sizes(box)) if size != 1), len(box))
    if any(box[k] != (0, shape[k]) for k in range(first_wide + 1, len(box))):
        return None
    return first_of(shape, box), volume(box)


def boxes_of(shape: Sequence[int], first: int, count: int) -> list[Box]:
    """A stretch as boxes, in its order: the rest of a row, whole rows, the beginning of a row; the same in each
    dimension.

    >>> boxes_of((4, 6), 4, 11)
    [((0, 1), (4, 6)), ((1, 2), (0, 6)), ((2, 3), (0, 3))]
    """
    if not count:
        return []
    if not shape:
        return [()]
    row_size, end = prod(shape[1:]), first + count
    row, last_row = first // row_size, (end - 1) // row_size

    def part_of_row(row: int, start: int, end: int) -> list[Box]:
        return [((row, row + 1), *rest) for rest in boxes_of(shape[1:], start, end - start)]

    if row == last_row:
        return part_of_row(row, first - row * row_size, end - row * row_size)
    found: list[Box] = []
    if first % row_size:
        found += part_of_row(row, first % row_size, row_size)
        row += 1
    if row < end // row_size:
        found.append(((row, end // row_size), *whole(shape[1:])))
    return found + part_of_row(last_row, 0, end % row_size)


def spans_of(shape: Sequence[int], box: Box, gap: int) -> Iterator[tuple[int, int]]:
    """Spans (start, end) in row-major order that contain a box. Gaps of at most `gap` elements are included in a span.

    >>> list(spans_of((3, 10), ((0, 3), (2, 4)), gap=7)), list(spans_of((3, 10), ((0, 3), (2, 4)), gap=8))
    ([(2, 4), (12, 14), (22, 24)], [(2, 24)])
    """
    if not volume(box):
        return
    step, span, apart = strides(shape), 1, len(shape)
    for dimension in reversed(range(len(shape))):  # gaps only grow from the inner dimensions to the outer ones
        if sizes(box)[dimension] > 1 and step[dimension] - span > gap:
            break
        span += (sizes(box)[dimension] - 1) * step[dimension]
        apart = dimension
    corner = first_of(shape, box)
    for place in itertools.product(*(range(size) for size in sizes(box)[:apart])):
        start = corner + sum(k * stride for k, stride in zip(place, step, strict=False))
        yield start, start + span


# --- coverage: whether each element is in exactly one piece -------------------------------------------------------


class Stretch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    part: int
    """1 for the first part."""
    first: int
    count: int
    box: Box | None = None
    """None: elements `first`, `first + 1`, … in row-major order. Otherwise `first` and `count` are derived from the
    box."""


def coverage_fault(name: str, shape: Sequence[int], stretches: Iterable[Stretch]) -> str:
    """Where the stretches miss elements of a tensor or hold them twice; an empty string if they cover it exactly.

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
    """The fault of a single piece, or an empty string."""
    of = f"tensor '{name}' of shape {shown_shape(shape)}"
    for stretch in stretches:
        if stretch.box is None:
            if stretch.first < 0 or stretch.count < 1 or stretch.first + stretch.count > prod(shape):
                return f"{of} has a stretch of {stretch.count} elements from {stretch.first} on"
            continue
        place = shown(stretch.box)
        if len(stretch.box) != len(shape):
            return f"{of} has a box of {len(stretch.box)} dimensions: {place}"
        if not is_box_of(shape, stretch.box):
            return f"{of} has a box that lies outside of it: {place}"
        if not stretch.count or stretch.count != volume(stretch.box):
            return f"{of} has the box {place} with {stretch.count} elements"
        if stretch.first != first_of(shape, stretch.box):
            return f"{of} has the box {place} from element {stretch.first} on"
    return ""


def _fault_of_boxes(name: str, shape: Sequence[int], stretches: Iterable[Stretch]) -> str:
    pieces = [
        (box, stretch.part)
        for stretch in stretches
        for box in ([stretch.box] if stretch.box is not None else boxes_of(shape, stretch.first, stretch.count))
    ]
    fault = _not_once(shape, pieces, ())
    if fault is None:
        return ""
    where, parts = fault
    held = _both(*parts[:2]) if parts else "in no part"
    return f"elements {shown(where)} of tensor '{name}' are {held}"


def _not_once(shape: Sequence[int], pieces: Sequence[tuple[Box, int]], upto: Box) -> tuple[Box, Sequence[int]] | None:
    """The first box that is not held exactly once, and the parts that hold it; tests one dimension after the other."""
    dimension = len(upto)
    rest = whole(shape[dimension:])
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
