"""What a run fixes of its tables: which there are, the optimizer of their rows, and how they are cut into parts.

A part has the rows of all tables whose numbers fall into its share of the buckets (rowbuckets.py). Nothing that is
learnt depends on how many parts there are: a row's bits depend on its own gradients only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import optim

from distbelief.errors import JobError
from distbelief.job import Job
from distbelief.strategies.ps.tables.embedding import tables_of
from distbelief.strategies.ps.tables.rowbuckets import BUCKETS, buckets_of
from distbelief.strategies.ps.tables.rowinit import TableForm
from distbelief.strategies.ps.tables.rowoptimizers import RowOptimizer


@dataclass(frozen=True)
class TableSpec:
    name: str
    """Of the module in the model."""
    form: TableForm
    optimizer: RowOptimizer


def specs_of(model: torch.nn.Module, job: Job) -> list[TableSpec]:
    """The tables of a model that are on servers."""
    return [
        TableSpec(name, table.form, row_optimizer(name, table.optimizer or job.optimizer))
        for name, table in tables_of(model)
    ]


def parts_for(servers: int) -> int:
    """As many as the run begins with servers, so that each has one. Two at least, for a second server to come; not
    more, since every part takes part in every update, however few of its rows are its own.

    >>> parts_for(1), parts_for(3)
    (2, 3)
    """
    return min(max(servers, 2), BUCKETS)


def part_of(rows: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """The part of every row: a run of buckets each.

    >>> part_of(np.array([0, 1, 2, 1]), 8).tolist()
    [7, 4, 4, 4]
    """
    return buckets_of(rows) * parts // BUCKETS


def row_optimizer(table: str, factory: Any) -> RowOptimizer:
    """What a torch optimizer is for a table's rows.

    >>> row_optimizer("users", lambda parameters: torch.optim.Adagrad(parameters, lr=0.05)).name
    'adagrad'
    >>> row_optimizer("users", lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    Traceback (most recent call last):
    distbelief.errors.JobError: the rows of table 'users' cannot be trained by SGD with momentum=0.9
    """
    made: optim.Optimizer = factory([torch.nn.Parameter(torch.zeros(1, 1))])
    kind = type(made)
    group = next(group for group in made.param_groups if group["params"])
    wanted: dict[Any, tuple[str, dict[str, Any]]] = {
        optim.SGD: ("sgd", {"momentum": 0, "weight_decay": 0, "maximize": False}),
        optim.Adagrad: ("adagrad", {"lr_decay": 0, "weight_decay": 0, "maximize": False}),
        optim.Adam: ("adam", {"weight_decay": 0, "amsgrad": False, "maximize": False}),
        optim.AdamW: ("adam", {"amsgrad": False, "maximize": False}),
    }
    hint = (
        "SGD without momentum, Adagrad, Adam and AdamW work row by row: give the table one of its own, as in "
        "EmbeddingTable(…, optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.05))"
    )
    if kind not in wanted:
        raise JobError(f"the rows of table '{table}' cannot be trained by {kind.__name__}", hint=hint)
    name, must_be = wanted[kind]
    if odd := [key for key, value in must_be.items() if group[key] != value]:
        odd_is = f"{odd[0]}={group[odd[0]]}"
        raise JobError(f"the rows of table '{table}' cannot be trained by {kind.__name__} with {odd_is}", hint=hint)
    return RowOptimizer(
        name,
        float(group["lr"]),
        group.get("eps"),
        tuple(group.get("betas", (0.9, 0.999))),
        group.get("initial_accumulator_value", 0.0),
        group["weight_decay"] if kind is optim.AdamW else 0.0,
        late_eps=True,
    )


@dataclass(frozen=True)
class PartArray:
    """One array of a part, and where it begins in its bytes."""

    table: int
    key: str
    """rows, values, or a field of the optimizer's state."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    at_bytes: int


class PartShape:
    """Where everything lies in the bytes of a part that has so many rows of each table."""

    def __init__(self, specs: Sequence[TableSpec], counts: Sequence[int]) -> None:
        self.counts = list(counts)
        self.arrays: list[PartArray] = []
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
                self.arrays.append(PartArray(number, key, dtype, shape, at))
                at += -(-torch.Size(shape).numel() * dtype.itemsize // 64) * 64
        self.size_bytes = max(at, 64)  # never nothing: a message has a frame, or has none

    def views(self, content: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        """The arrays in these bytes, by table."""
        found: list[dict[str, torch.Tensor]] = [{} for _ in self.counts]
        for array in self.arrays:
            size = torch.Size(array.shape).numel() * array.dtype.itemsize
            part = content[array.at_bytes : array.at_bytes + size]
            whole = part.view(array.dtype).view(array.shape) if size else torch.empty(array.shape, dtype=array.dtype)
            found[array.table][array.key] = whole
        return found
