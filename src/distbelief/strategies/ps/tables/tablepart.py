"""One part of a run's tables on one server: the rows, what is saved and copied of them, and what is asked of them.

It is half of a `SliceStore`; how it is changed is steptables.py's and freetables.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from distbelief.job import Job
from distbelief.strategies.ps.protocol.frames import Letter
from distbelief.strategies.ps.protocol.messages import Contents, Given, Read
from distbelief.strategies.ps.server.stores import Change
from distbelief.strategies.ps.tables.messages import Count, Counted, Numbers, Pull, Pulled
from distbelief.strategies.ps.tables.store import Table
from distbelief.strategies.ps.tables.tablespecs import PartShape, TableSpec

Arrays = dict[str, torch.Tensor]


class TablePart:
    """The rows of this part, of every table."""

    def __init__(self, specs: Sequence[TableSpec], job: Job) -> None:
        self.version = 0
        self._specs = specs
        self._job = job
        self._widths = [spec.form.width for spec in specs]
        self.tables = [Table(spec.form, spec.optimizer) for spec in specs]

    def begin(self, tables: Sequence[Arrays], version: int) -> None:
        """The first state of a life."""
        self.version = version
        for table, arrays in zip(self.tables, tables, strict=True):
            table.load(arrays)

    def _factor(self, step: int) -> float:
        return self._job.schedule(step) if self._job.schedule else 1.0

    @property
    def counts(self) -> list[int]:
        return [table.resident for table in self.tables]

    def contents(self) -> torch.Tensor:
        """A copy of everything."""
        shape = PartShape(self._specs, self.counts)
        content = torch.zeros(shape.size_bytes, dtype=torch.uint8)
        for table, views in zip(self.tables, shape.views(content), strict=True):
            for key, values in table.state().items():
                views[key].copy_(values)
        return content

    def _load(self, counts: Sequence[int], content: torch.Tensor) -> int:
        """Returns where the bytes of the tables end."""
        shape = PartShape(self._specs, counts)
        for table, arrays in zip(self.tables, shape.views(content), strict=True):
            table.load(arrays)
        return shape.size_bytes

    def with_bytes(self, change: Change) -> Change:
        return change  # it has them

    def given(self, client: int) -> Given | None:
        return None

    def _values(self, question: Pull) -> Letter:
        rows = torch.from_numpy(np.frombuffer(question.rows, np.int64).copy())
        values = self.tables[question.table].pull(rows).numpy()
        return Letter(Pulled(question.ticket, question.slice, self.version), values.reshape(-1).view(np.uint8))

    def _numbers(self, question: Numbers) -> Letter:
        rows = self.tables[question.table].numbers()
        return Letter(Pulled(question.ticket, question.slice, self.version), rows.view(np.uint8))

    def _counted(self, question: Count) -> Letter:
        return Letter(Counted(question.ticket, question.slice, self.version, self.counts))

    def _read(self, question: Read) -> Letter:
        header = Contents(question.ticket, question.slice, self.version, self.counts)
        return Letter(header, self.contents().numpy())


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A view, where that can be: what came in a message may be read only, or begin anywhere."""
    return torch.from_numpy(np.require(array, requirements=["C", "A", "W"]))
