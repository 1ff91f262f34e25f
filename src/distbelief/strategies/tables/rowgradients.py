"""Gradients of rows of sparse tables: added up row by row, and as the bytes that workers push.

A push has one payload per part of the tables: the numbers of all rows, table by table and within a table shard by
shard; then the gradients in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distbelief.errors import DistBeliefError
from distbelief.strategies.ps.tables.rowbuckets import part_of


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


@dataclass(frozen=True)
class PartPayload:
    """The bytes that a worker pushes to one part of the tables."""

    counts: list[list[int]]
    """By table, by shard: the number of rows."""
    content: bytes


def payloads_by_part(shards: Sequence[Sequence[RowGradients]], parts: int) -> list[PartPayload]:
    """Divide row gradients among the parts. `shards`: by shard, the gradients of every table."""
    counts: list[list[list[int]]] = [[] for _ in range(parts)]
    rows: list[list[bytes]] = [[] for _ in range(parts)]
    gradients: list[list[bytes]] = [[] for _ in range(parts)]
    for of_table in zip(*shards, strict=True):
        numbers = np.concatenate([one.rows for one in of_table])
        values = np.concatenate([one.gradients for one in of_table])
        shard = np.repeat(np.arange(len(of_table)), [len(one.rows) for one in of_table])
        of = part_of(numbers, parts)
        order = np.argsort(of, kind="stable")
        ends = np.searchsorted(of[order], np.arange(parts), side="right").tolist()
        first = 0
        for part, end in enumerate(ends):
            mine = order[first:end]
            counts[part].append(np.bincount(shard[mine], minlength=len(of_table)).tolist())
            rows[part].append(numbers[mine].tobytes())
            gradients[part].append(values[mine].tobytes())
            first = end
    return [PartPayload(counts[part], b"".join(rows[part] + gradients[part])) for part in range(parts)]


def from_payload(counts: Sequence[Sequence[int]], widths: Sequence[int], payload: Any) -> list[list[RowGradients]]:
    """By shard, the gradients of every table: views of the payload, without a copy."""
    raw = memoryview(payload)
    totals = [sum(some) for some in counts]
    row_bytes = 8 * sum(totals)
    size_bytes = row_bytes + 4 * sum(total * width for total, width in zip(totals, widths, strict=True))
    if raw.nbytes != size_bytes:
        raise DistBeliefError(f"row gradients came in {raw.nbytes} bytes, not in {size_bytes}")
    shards: list[list[RowGradients]] = [[] for _ in counts[0]]
    at_row, at_value = 0, row_bytes
    for some, width in zip(counts, widths, strict=True):
        for shard, count in enumerate(some):
            numbers = np.frombuffer(raw, np.int64, count, at_row)
            values = np.frombuffer(raw, np.float32, count * width, at_value).reshape(count, width)
            shards[shard].append(RowGradients(numbers, values))
            at_row, at_value = at_row + 8 * count, at_value + 4 * count * width
    return shards
