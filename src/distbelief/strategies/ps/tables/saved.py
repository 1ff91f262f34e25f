"""Sparse tables in checkpoints and weights files: the names of their tensors, and how they are written and read.

    model/NAME.rows           the numbers of all rows that were ever changed; in a checkpoint part by part
    model/NAME.values         their values
    optimizer/KEY/NAME.values the optimizer's state of these rows

No name has a server or worker in it, so any number of them can load a checkpoint. A weights file has the first two,
with ascending rows. A table that was saved as an ordinary parameter (`model/NAME.weight`) can be loaded into servers,
too, and rows from servers into an ordinary parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from distbelief.checkpoint.lazy import LazyTensors, outlines_of
from distbelief.checkpoint.manifest import PartEntry
from distbelief.checkpoint.parts import Slice, dtype_name
from distbelief.checkpoint.sources import MODEL
from distbelief.errors import DistBeliefError
from distbelief.strategies.base import Portion, Saved
from distbelief.strategies.ps.tables.rowbuckets import part_of
from distbelief.strategies.ps.tables.specs import TablePartArray, TablePartShape, TableSpec
from distbelief.transport.shm.segment import Segment

Arrays = dict[str, torch.Tensor]


def tensor_name(spec: TableSpec, key: str) -> str:
    """
    >>> from distbelief.strategies.tables.rowinit import TableForm
    >>> from distbelief.strategies.ps.tables.rowoptimizers import RowOptimizer
    >>> users = TableSpec("users", TableForm("", 10, 2), RowOptimizer("adagrad", 0.1))
    >>> tensor_name(users, "rows"), tensor_name(users, "sum")
    ('model/users.rows', 'optimizer/sum/users.values')
    """
    return f"{MODEL}{spec.name}.{key}" if key in ("rows", "values") else f"optimizer/{key}/{spec.name}.values"


class PortionWithTables:
    """See `Portion`: a member's portion of the dense parameters, then some parts of the tables."""

    def __init__(
        self, dense: Portion, specs: Sequence[TableSpec], counts: Sequence[Sequence[int]], parts: Sequence[int]
    ) -> None:
        """`counts`: by part, by table, the number of rows."""
        self.dense = dense
        self.parts = parts
        self.shapes = {part: TablePartShape(specs, counts[part]) for part in parts}
        self.starts: dict[int, int] = {}
        """Part -> its offset in the portion."""
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

    def _entry(self, part: int, array: TablePartArray) -> PartEntry | None:
        """The rows of all parts are one tensor. A part without rows has no entry; for an empty tensor the first part
        has it."""
        by_part = [counts[array.table] for counts in self._counts]
        rest = array.shape[1:]
        whole = (sum(by_part), *rest)
        width = torch.Size(rest).numel()
        if not by_part[part] and (part or whole[0]):
            return None
        name = tensor_name(self._specs[array.table], array.key)
        return PartEntry(name, dtype_name(array.dtype), whole, sum(by_part[:part]) * width, by_part[part] * width)


def without_tables(saved: Saved, specs: Sequence[TableSpec]) -> Saved:
    """The saved state of the dense parameters alone."""
    kept = [name for name in saved.tensors if not _is_of_table(name, specs)]
    if isinstance(saved.tensors, LazyTensors):
        return replace(saved, tensors=saved.tensors.read_whole(kept))
    return replace(saved, tensors={name: saved.tensors[name] for name in kept})


def _is_of_table(name: str, specs: Sequence[TableSpec]) -> bool:
    endings = [f"{spec.name}.{key}" for spec in specs for key in ("rows", "values", "weight")]
    return name.startswith((MODEL, "optimizer/", "begun/")) and name.endswith(tuple(f"/{one}" for one in endings))


class SavedTables:
    """The rows of a saved state, part by part. From a state that is read lazily only the wanted rows are read."""

    def __init__(self, saved: Saved | None, specs: Sequence[TableSpec], parts: int) -> None:
        """`parts`: the number of parts of this run."""
        self._tensors = saved.tensors if saved else {}
        self._specs = specs
        self._forms = outlines_of(self._tensors)
        self._rows = [self._all_rows(spec) for spec in specs]
        self._parts = [part_of(rows, parts).astype(np.int16) for rows in self._rows]

    def part(self, part: int) -> list[Arrays]:
        """The rows of this part by table, ascending."""
        return [
            self._table(spec, rows, np.flatnonzero(parts == part))
            for spec, rows, parts in zip(self._specs, self._rows, self._parts, strict=True)
        ]

    def _is_dense(self, spec: TableSpec) -> bool:
        """Whether the table was saved as an ordinary parameter, with every row."""
        return f"{MODEL}{spec.name}.weight" in self._forms

    def _all_rows(self, spec: TableSpec) -> NDArray[np.int64]:
        """The numbers of the saved rows, in the order in which they were saved."""
        if self._is_dense(spec):
            _, shape = self._forms[f"{MODEL}{spec.name}.weight"]
            if shape != (spec.form.rows, spec.form.width):
                raise DistBeliefError(
                    f"the table '{spec.name}' was saved with {shape[0]:,} rows of {shape[1]} numbers, and is declared "
                    f"with {spec.form.rows:,} of {spec.form.width}",
                    hint="declare the table as it was when it was saved",
                )
            return np.arange(spec.form.rows)
        name = tensor_name(spec, "rows")
        return self._tensors[name].numpy() if name in self._forms else np.zeros(0, np.int64)

    def _table(self, spec: TableSpec, rows: NDArray[np.int64], mine: NDArray[np.int64]) -> Arrays:
        """`mine`: the indices of the wanted rows."""
        rows = rows[mine]
        found = {"rows": torch.from_numpy(rows), "values": self._array(spec, "values", (spec.form.width,), mine)}
        for field in spec.optimizer.fields:
            rest = (spec.form.width,) if field.wide else ()
            found[field.name] = self._array(spec, field.name, rest, mine)
            if not self._has(spec, field.name):  # weights alone, or rows that were never changed
                found[field.name].fill_(spec.optimizer.begin(field))
            found[field.name] = found[field.name].to(getattr(torch, field.dtype))
        order = torch.from_numpy(np.argsort(rows))
        return {key: array[order] for key, array in found.items()}

    def _name(self, spec: TableSpec, key: str) -> str:
        name = tensor_name(spec, key)
        return f"{name.removesuffix('.values')}.weight" if self._is_dense(spec) else name

    def _has(self, spec: TableSpec, key: str) -> bool:
        if self._name(spec, key) in self._forms:
            return True
        ending = self._name(spec, "values").removeprefix(MODEL)
        if any(name.startswith("optimizer/") and name.endswith(f"/{ending}") for name in self._forms):
            raise DistBeliefError(
                f"the table '{spec.name}' was saved with another optimizer: it has no {key}",
                hint="continue with the optimizer that it was saved with",
            )
        return False

    def _array(self, spec: TableSpec, key: str, rest: tuple[int, ...], mine: NDArray[np.int64]) -> torch.Tensor:
        if not len(mine) or not (key == "values" or self._has(spec, key)):
            return torch.zeros(len(mine), *rest)
        name, places = self._name(spec, key), torch.from_numpy(mine)
        _, shape = self._forms[name]
        if self._is_dense(spec) and not rest and shape == ():  # one number of steps for all rows
            return self._tensors[name].reshape(1).expand(len(mine)).clone()
        if shape[1:] != rest:
            raise DistBeliefError(
                f"the table '{spec.name}' was saved with other rows: {key} is {list(shape)}, not {[shape[0], *rest]}",
                hint="declare the table as it was when it was saved",
            )
        first, end = int(mine[0]), int(mine[-1]) + 1
        if isinstance(self._tensors, LazyTensors) and end - first == len(mine):  # as our checkpoints have them
            return self._tensors.read_box(name, ((first, end), *((0, size) for size in rest)))
        return self._tensors[name][places]
