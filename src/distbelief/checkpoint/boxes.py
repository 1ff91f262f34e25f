"""Boxes of a tensor: (start, end) for each of its dimensions; () is all of a single number. Pure geometry.

A tensor's elements also have an order, row after row. A stretch of that order is a few boxes (`boxes_of`), and some
boxes are one stretch (`stretch_of`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod

Box = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def sizes(box: Box) -> tuple[int, ...]:
    return tuple(end - start for start, end in box)


def volume(box: Box) -> int:
    return prod(sizes(box))


def common(one: Box, other: Box) -> Box | None:
    """What two boxes of one tensor share; None: no element.

    >>> common(((0, 4), (0, 2)), ((2, 8), (1, 2)))
    ((2, 4), (1, 2))
    >>> common((), ())
    ()
    """
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < end for start, end in both) else None


def within(box: Box, holder: Box) -> Box:
    """A box as seen from the corner of one that holds it.

    >>> within(((2, 4),), ((1, 9),))
    ((1, 3),)
    """
    return tuple((start - low, end - low) for (start, end), (low, _) in zip(box, holder, strict=True))


def inside(box: Box, holder: Box) -> tuple[slice, ...]:
    """Where a box lies in a tensor that holds another one around it."""
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
    """How far apart in the order neighbours are, for each dimension.

    >>> strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def first_of(shape: Sequence[int], box: Box) -> int:
    """The place in the order of a box's first element."""
    return sum(start * stride for (start, _), stride in zip(box, strides(shape), strict=True))


def stretch_of(shape: Sequence[int], box: Box) -> tuple[int, int] | None:
    """First element and number of elements of a box that is a single stretch; None: it is not.

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
    """A stretch as boxes, in its order: the rest of a row, whole rows, the beginning of a row; so in each dimension.

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
    """Spans of the order, (start, end), that hold a box. Between two of them lie more than `gap` elements; smaller gaps
    are in the spans.

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
