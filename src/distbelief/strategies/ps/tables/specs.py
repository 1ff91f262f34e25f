"""The sparse tables of a run, the optimizers of their rows, and the layout of a part's bytes.

A part has the rows of all tables whose numbers fall into its share of the buckets (rowbuckets.py). The number of parts
changes no bit: a row's bits depend on its own gradients only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distbelief.job import Job
from distbelief.strategies.ps.tables.rowoptimizers import RowOptimizer, row_optimizer
from distbelief.strategies.tables.embedding import tables_of
from distbelief.strategies.tables.rowinit import TableForm


@dataclass(frozen=True)
class TableSpec:
    name: str
    """The name of the module in the model."""
    form: TableForm
    optimizer: RowOptimizer


def specs_of(model: torch.nn.Module, job: Job) -> list[TableSpec]:
    """The tables of a model that lie on servers."""
    return [
        TableSpec(name, table.form, row_optimizer(name, table.optimizer or job.optimizer))
        for name, table in tables_of(model)
    ]


@dataclass(frozen=True)
class TablePartArray:
    """One array of a part, and its offset in the bytes of the part."""

    table: int
    key: str
    """`rows` (the numbers), `values`, or a field of the optimizer's state."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    at_bytes: int


class TablePartShape:
    """The layout of the bytes of a part with `counts` rows of each table."""

    def __init__(self, specs: Sequence[TableSpec], counts: Sequence[int]) -> None:
        self.counts = list(counts)
        self.arrays: list[TablePartArray] = []
        at = 0
        for number, (spec, count) in enumerate(zip(specs, counts, strict=True)):
            wide = (count, spec.form.width)
            kinds: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
                ("rows", torch.int64, (count,)),
                ("values", torch.float32, wide),
            ]
            kinds += [
                (field.name, getattr(torch, field.dtype), wide if field.wide else (count,))
                for field in spec.optimizer.fields
            ]
            for key, dtype, shape in kinds:
                self.arrays.append(TablePartArray(number, key, dtype, shape, at))
                at += -(-torch.Size(shape).numel() * dtype.itemsize // 64) * 64
        self.size_bytes = max(at, 64)  # never 0: the message would have no payload

    def views(self, content: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        """The arrays in these bytes, by table."""
        found: list[dict[str, torch.Tensor]] = [{} for _ in self.counts]
        for array in self.arrays:
            size = torch.Size(array.shape).numel() * array.dtype.itemsize
            part = content[array.at_bytes : array.at_bytes + size]
            whole = part.view(array.dtype).view(array.shape) if size else torch.empty(array.shape, dtype=array.dtype)
            found[array.table][array.key] = whole
        return found
