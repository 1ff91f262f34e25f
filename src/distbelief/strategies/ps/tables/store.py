"""The store behind one server's part of a sparse table: values and optimizer state of the rows that were changed.

No sockets and no threads: operations come one at a time, and the same operations in the same order give the same
bits. More than that, a row's bits depend only on the gradients given for that row. Whether a push of this name came
before, and which rows belong here, is for others to know.

A row becomes resident when it is first pushed to. A pull only looks: a row that is not resident has its initial
values, which are computed again each time. So pulls change nothing that a backup would have to be told, and
an evaluation over all rows costs no memory.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from distbelief.errors import DistBeliefError
from distbelief.strategies.ps.tables.rowarrays import RowArray, write_rows
from distbelief.strategies.ps.tables.rowinit import TableForm
from distbelief.strategies.ps.tables.rowoptimizers import RowOptimizer
from distbelief.strategies.ps.tables.rowslots import ABSENT, RowSlots
from distbelief.strategies.ps.tables.rowsums import added_up


class Table:
    """Some rows of a sparse table, of which only those that were pushed to take memory.

    >>> from distbelief.strategies.ps.tables.rowinit import RowInit
    >>> table = Table(TableForm("words", rows=50_000_000, width=2, init=RowInit("zeros")), RowOptimizer("sgd", lr=1.0))
    >>> table.push(torch.tensor([40_000_000, 7, 7]), torch.ones(3, 2))
    >>> table.pull(torch.tensor([7, 8, 40_000_000]))
    tensor([[-2., -2.],
            [ 0.,  0.],
            [-1., -1.]])
    >>> table.resident
    2
    """

    def __init__(self, form: TableForm, optimizer: RowOptimizer) -> None:
        self.form = form
        self.optimizer = optimizer
        self._empty()

    @property
    def resident(self) -> int:
        """How many rows take memory."""
        return self._slots.count

    def pull(self, rows: torch.Tensor) -> torch.Tensor:
        """The values of these rows, in this order; a row may be asked for several times."""
        numbers = self._checked_rows(rows)
        slots = self._slots.find(numbers)
        absent = np.flatnonzero(slots == ABSENT)
        values = self._arrays["values"].gather(slots)
        if absent.size:
            write_rows(values, absent, self.form.initial(numbers[absent]))
        return torch.from_numpy(values)

    def push(self, rows: torch.Tensor, gradients: torch.Tensor, factor: float = 1.0) -> None:
        """One step of the optimizer on these rows; `factor` multiplies its learning rate.

        Gradients of the same row are added up first, in the order in which they were given.
        """
        numbers = self._checked_rows(rows)
        wanted = (numbers.shape[0], self.form.width)
        if gradients.dtype != torch.float32 or gradients.shape != wanted:
            raise DistBeliefError(
                f"gradients of {numbers.shape[0]} rows of table '{self.form.name}' came as {_kind(gradients)}",
                hint=f"send float32 numbers of shape {list(wanted)}",
            )
        numbers, total = added_up(numbers, gradients.detach().numpy())
        slots = self._slots.find(numbers)
        absent = np.flatnonzero(slots == ABSENT)
        if absent.size:
            slots[absent] = self._add(numbers[absent])
        gathered = {name: array.gather(slots) for name, array in self._arrays.items()}
        self.optimizer.step(gathered["values"], gathered, total, factor)
        for name, array in self._arrays.items():
            array.scatter(slots, gathered[name])

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of all resident rows, ascending: equal contents give equal bytes, whatever their history."""
        return self.state_of(np.argsort(self._slots.numbers))

    def state_of(self, slots: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """A copy of the rows in these slots, in this order."""
        state = {name: torch.from_numpy(array.gather(slots)) for name, array in self._arrays.items()}
        return {"rows": torch.from_numpy(self._slots.numbers.take(slots)), **state}

    def numbers(self) -> NDArray[np.int64]:
        """Of the resident rows, in the order in which they came."""
        return self._slots.numbers.copy()

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Have exactly these rows, whatever was here before. A state that does not fit changes nothing."""
        self._check(state)
        self._empty()
        self._enter(state)

    def _empty(self) -> None:
        self._slots = RowSlots()
        self._arrays = {"values": RowArray(self.form.width, np.float32)}
        for field in self.optimizer.fields:
            self._arrays[field.name] = RowArray(self.form.width if field.wide else None, field.dtype)

    def _add(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Make rows resident, with their initial values; none of them is, and none is given twice."""
        slots = self._reserved(numbers)
        first, end = self._slots.count - numbers.shape[0], self._slots.count
        self._arrays["values"].rows[first:end] = self.form.initial(numbers)
        for field in self.optimizer.fields:
            self._arrays[field.name].rows[first:end] = self.optimizer.begin(field)
        return slots

    def _enter(self, state: dict[str, torch.Tensor]) -> None:
        self._reserved(state["rows"].numpy())
        for name, array in self._arrays.items():
            array.rows[self._slots.count - len(state["rows"]) : self._slots.count] = state[name].numpy()

    def _reserved(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """New slots. Memory is asked for first: if there is none, nothing has changed."""
        for array in self._arrays.values():
            array.reserve(self._slots.count + numbers.shape[0])
        return self._slots.add(numbers)

    def _checked_rows(self, rows: torch.Tensor) -> NDArray[np.int64]:
        if rows.dtype != torch.int64 or rows.dim() != 1:
            raise DistBeliefError(
                f"rows of table '{self.form.name}' were named by {_kind(rows)}", hint="use a list of int64 numbers"
            )
        numbers: NDArray[np.int64] = rows.numpy()
        if numbers.shape[0] and (numbers.min() < 0 or numbers.max() >= self.form.rows):
            outside = numbers[(numbers < 0) | (numbers >= self.form.rows)]
            raise DistBeliefError(
                f"table '{self.form.name}' has no row {outside[0]}: it has {self.form.rows:,} rows",
                hint="declare the table with more rows, or bring the numbers into its range (e.g. by a hash)",
            )
        return numbers

    def _check(self, state: dict[str, torch.Tensor]) -> None:
        """That this state is one of such a table, under such an optimizer."""
        names = {"rows", *self._arrays}
        if set(state) != names:
            raise self._unfit(
                f"it holds {', '.join(sorted(state))} instead of {', '.join(sorted(names))}",
                f"continue with the optimizer that the state was saved with (now: {self.optimizer.name})",
            )
        numbers = self._checked_rows(state["rows"])
        if (numbers[1:] <= numbers[:-1]).any():
            raise self._unfit("its rows are not in ascending order", "only load what `state` gave")
        for name, array in self._arrays.items():
            kind = torch.from_numpy(array.rows[:0]).dtype, (numbers.shape[0], *array.rows.shape[1:])
            if (state[name].dtype, tuple(state[name].shape)) != kind:
                raise self._unfit(
                    f"'{name}' is {_kind(state[name])} instead of {kind[0]} {list(kind[1])}",
                    "declare the table as it was when the state was saved",
                )

    def _unfit(self, reason: str, hint: str) -> DistBeliefError:
        return DistBeliefError(f"this state does not fit table '{self.form.name}': {reason}", hint=hint)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} numbers of shape {list(tensor.shape)}"
