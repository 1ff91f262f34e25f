"""Tables under names: how the rows that servers have are saved, and found again.

    model/NAME.rows           the numbers of all rows that were ever changed, in a checkpoint part by part
    model/NAME.values         their values
    optimizer/KEY/NAME.values what the optimizer keeps for them

Servers and workers are nowhere in the names, so any number of them can load it. A file of weights has the first two,
in ascending order of the rows. A table that was an ordinary parameter when it was saved (`model/NAME.weight`) is
taken, too, and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from distbelief.checkpoint.manifest import PartEntry
from distbelief.checkpoint.parts import Slice, dtype_name
from distbelief.checkpoint.sources import MODEL
from distbelief.comm.segment import Segment
from distbelief.errors import DistBeliefError
from distbelief.strategies.base import Portion, Saved
from distbelief.strategies.tablespecs import PARTS, PartArray, PartShape, TableSpec, part_of

Arrays = dict[str, torch.Tensor]


def tensor_name(spec: TableSpec, key: str) -> str:
    """
    >>> from distbelief.strategies.rowinit import TableForm
    >>> from distbelief.strategies.rowoptimizers import RowOptimizer
    >>> users = TableSpec("users", TableForm("", 10, 2), RowOptimizer("adagrad", 0.1))
    >>> tensor_name(users, "rows"), tensor_name(users, "sum")
    ('model/users.rows', 'optimizer/sum/users.values')
    """
    return f"{MODEL}{spec.name}.{key}" if key in ("rows", "values") else f"optimizer/{key}/{spec.name}.values"


class PortionWithTables:
    """See `Portion`: what a member saves of the dense parameters, then some parts of the tables."""

    def __init__(
        self, dense: Portion, specs: Sequence[TableSpec], counts: Sequence[Sequence[int]], parts: Sequence[int]
    ) -> None:
        """`counts`: by part, by table, how many rows there are."""
        self.dense = dense
        self.parts = parts
        self.shapes = {part: PartShape(specs, counts[part]) for part in parts}
        self.starts: dict[int, int] = {}
        """Part -> the byte at which it starts."""
        self._specs = specs
        self._counts = counts
        at = -(-dense.size_bytes // 64) * 64
        for part, shape in self.shapes.items():
            self.starts[part] = at
            at += shape.size_bytes
        self.size_bytes = at

    def entries(self) -> list[PartEntry]:
        return [*self.dense.entries(), *(entry for entry, _ in self._all())]

    def slices(self, copy: Segment, outside: Mapping[str, torch.Tensor]) -> list[Slice]:
        found = []
        for entry, at in self._all():
            values = copy.tensor(getattr(torch, entry.dtype), at, entry.count)
            found.append(Slice(entry.tensor, values, entry.shape, entry.first))
        return [*self.dense.slices(copy, outside), *found]

    def _all(self) -> list[tuple[PartEntry, int]]:
        return [
            (entry, self.starts[part] + array.at_bytes)
            for part in self.parts
            for array in self.shapes[part].arrays
            if (entry := self._entry(part, array))
        ]

    def _entry(self, part: int, array: PartArray) -> PartEntry | None:
        """Of all parts together the rows are one tensor. Nothing is nobody's, but of an empty tensor the first
        part's."""
        by_part = [counts[array.table] for counts in self._counts]
        rest = array.shape[1:]
        whole = (sum(by_part), *rest)
        width = torch.Size(rest).numel()
        if not by_part[part] and (part or whole[0]):
            return None
        name = tensor_name(self._specs[array.table], array.key)
        return PartEntry(name, dtype_name(array.dtype), whole, sum(by_part[:part]) * width, by_part[part] * width)


def without_tables(saved: Saved, specs: Sequence[TableSpec]) -> Saved:
    """What is left for the dense parameters."""
    kept = {name: tensor for name, tensor in saved.tensors.items() if not _is_of_table(name, specs)}
    return replace(saved, tensors=kept)


def _is_of_table(name: str, specs: Sequence[TableSpec]) -> bool:
    endings = [f"{spec.name}.{key}" for spec in specs for key in ("rows", "values", "weight")]
    return name.startswith((MODEL, "optimizer/", "begun/")) and name.endswith(tuple(f"/{one}" for one in endings))


def tables_in(saved: Saved | None, specs: Sequence[TableSpec]) -> list[Arrays]:
    """The rows of every table, in any order; none where the state has nothing of it."""
    return [_table_in(saved.tensors if saved else {}, spec) for spec in specs]


def _table_in(tensors: Mapping[str, torch.Tensor], spec: TableSpec) -> Arrays:
    rows = tensors.get(tensor_name(spec, "rows"))
    if rows is None:
        rows, tensors = _from_dense(tensors, spec)
    found = {"rows": rows, "values": _fitting(tensors, spec, "values", len(rows), spec.form.width)}
    for field in spec.optimizer.fields:
        name = tensor_name(spec, field.name)
        shape = (len(rows), spec.form.width) if field.wide else (len(rows),)
        if name in tensors:
            found[field.name] = _fitting(tensors, spec, field.name, *shape)
        elif any(other.startswith("optimizer/") and other.endswith(f"/{spec.name}.values") for other in tensors):
            raise DistBeliefError(
                f"the table '{spec.name}' was saved with another optimizer: it has no {field.name}",
                hint="continue with the optimizer that it was saved with",
            )
        else:  # weights alone
            found[field.name] = torch.full(shape, spec.optimizer.begin(field), dtype=getattr(torch, field.dtype))
    return found


def _fitting(tensors: Mapping[str, torch.Tensor], spec: TableSpec, key: str, *shape: int) -> torch.Tensor:
    tensor = tensors[tensor_name(spec, key)]
    if tuple(tensor.shape) != shape:
        raise DistBeliefError(
            f"the table '{spec.name}' was saved with other rows: {key} is {list(tensor.shape)}, not {list(shape)}",
            hint="declare the table as it was when it was saved",
        )
    return tensor


def _from_dense(tensors: Mapping[str, torch.Tensor], spec: TableSpec) -> tuple[torch.Tensor, Arrays]:
    """A table that was an ordinary parameter: every row is there. It knew one number of steps for all its rows."""
    weight = tensors.get(f"{MODEL}{spec.name}.weight")
    if weight is None:
        empty = torch.zeros(0, dtype=torch.int64)
        return empty, {tensor_name(spec, "values"): torch.zeros(0, spec.form.width)}
    found: Arrays = {tensor_name(spec, "values"): weight}
    for field in spec.optimizer.fields:
        kept = tensors.get(f"optimizer/{field.name}/{spec.name}.weight")
        if kept is not None:
            whole = kept if field.wide else kept.reshape(1).expand(len(weight))
            found[tensor_name(spec, field.name)] = whole.to(getattr(torch, field.dtype))
    return torch.arange(len(weight)), found


def part_in(tables: Sequence[Arrays], part: int) -> list[Arrays]:
    """What one part has of these tables, rows ascending."""
    found = []
    for arrays in tables:
        rows = arrays["rows"].numpy()
        mine = np.flatnonzero(part_of(rows) == part)
        order = torch.from_numpy(mine[np.argsort(rows[mine])])
        found.append({key: array[order] for key, array in arrays.items()})
    return found


def weights_in(specs: Sequence[TableSpec], parts: Mapping[int, Sequence[Arrays]]) -> dict[str, torch.Tensor]:
    """The tables as a file of weights has them: rows ascending."""
    assert len(parts) == PARTS or not specs
    found = {}
    for number, spec in enumerate(specs):
        rows = torch.cat([parts[part][number]["rows"] for part in sorted(parts)])
        values = torch.cat([parts[part][number]["values"] for part in sorted(parts)])
        order = torch.argsort(rows)
        found[f"{spec.name}.rows"] = rows[order]
        found[f"{spec.name}.values"] = values[order]
    return found
