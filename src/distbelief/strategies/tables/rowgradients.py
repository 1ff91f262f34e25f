"""Gradients of rows of sparse tables, added up row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def added_up(
    numbers: NDArray[np.int64], gradients: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Every row once, ascending, with the sum of its gradients; in a new array.

    The gradients of a row are added along a binary tree over the order in which they were given, (1+2)+(3+4)…: as
    many passes as the tree is high, also where thousands of gradients are for one row.

    >>> rows, total = added_up(np.array([5, 3, 5]), np.array([[1.0], [2.0], [4.0]], np.float32))
    >>> rows.tolist(), total.tolist()
    ([3, 5], [[2.0], [5.0]])
    """
    order = np.argsort(numbers, kind="stable")
    ordered = numbers.take(order)
    total = gradients.take(order, axis=0)
    is_first = np.ones(ordered.shape[0], np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    firsts = np.flatnonzero(is_first)
    if firsts.shape[0] == ordered.shape[0]:
        return ordered, total
    place = np.arange(ordered.shape[0]) - firsts.take(np.cumsum(is_first) - 1)  # 0, 1, 2… within each row
    later = np.flatnonzero(place)
    distance = 1
    while later.size:
        is_right = (place[later] & distance) != 0
        right = later[is_right]
        total[right - distance] += total[right]
        later = later[~is_right]
        distance *= 2
    return ordered.take(firsts), total.take(firsts, axis=0)


@dataclass(frozen=True)
class RowGradients:
    """Rows of one table, each once and ascending, and their gradients, as a backward pass gives them."""

    rows: NDArray[np.int64]
    gradients: NDArray[np.float32]


def added_rows(several: Sequence[RowGradients]) -> RowGradients:
    """The sum of row gradients of one table."""
    if len(several) == 1:
        return several[0]
    rows, gradients = ([getattr(one, name) for one in several] for name in ("rows", "gradients"))
    return RowGradients(*added_up(np.concatenate(rows), np.concatenate(gradients)))
