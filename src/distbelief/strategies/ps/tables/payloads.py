"""Gradients of rows as the bytes that workers push to the parts of the tables.

A push has one payload per part of the tables: the numbers of all rows, table by table and within a table shard by
shard; then the gradients in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distbelief.errors import DistBeliefError
from distbelief.strategies.ps.tables.rowbuckets import part_of
from distbelief.strategies.tables.rowgradients import RowGradients


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
