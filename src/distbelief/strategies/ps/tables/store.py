"""The rows of one sparse table on one server: arrays that grow, a hash table from row numbers to slots, and `Table`.

Pushes and pulls come one at a time, and the same operations in the same order give the same bits. A row's bits depend
only on the gradients that are pushed for this row. A slice (slices.py) decides which pushes are applied.

A row is stored when it is first pushed to. A pull of a row that is not stored computes its initial values again. So
pulls change nothing that a backup would need, and an evaluation over all rows costs no memory.

`RowArray` is an anonymous mapping: the kernel gives a page when it is first written, and `mremap` moves a mapping to a
larger place by moving page tables. So growth copies nothing, and unused capacity takes no memory. Rows are read and
written as records of bytes, which numpy moves whole; it moves rows of a two-dimensional array number by number (4,096
rows of 16 among a million: reading 0.09 against 0.15 ms, writing 0.15 against 0.46).

`RowSlots` is an open-addressing hash table that is searched for thousands of rows at once. A slot is an index into the
arrays of a table; rows get slots 0, 1, 2 … as they are added, and keep them. The hash table holds slots only (4 bytes
each). A search looks at the home of every row in one pass, then at the next places of the rows that are not found yet:
a few passes over ever fewer rows instead of a loop over rows.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from distbelief.errors import DistBeliefError, NotEnoughMemory
from distbelief.strategies.ps.tables.rowoptimizers import RowOptimizer
from distbelief.strategies.tables.rowgradients import added_up
from distbelief.strategies.tables.rowinit import TableForm, mixed

_FIRST_ROWS = 1024


class RowArray:
    """Rows of one width and type, zero where nothing was written. `rows` is a view that does not outlive `reserve`.

    >>> array = RowArray(4, np.float32)
    >>> array.rows[3] = 1.0
    >>> array.reserve(1_000_000)
    >>> array.rows.shape[0] >= 1_000_000, array.rows[3].tolist()
    (True, [1.0, 1.0, 1.0, 1.0])
    """

    def __init__(self, width: int | None, dtype: DTypeLike) -> None:
        """`width` None: one number per row."""
        self._shape: tuple[int, ...] = () if width is None else (width,)
        self._dtype = np.dtype(dtype)
        self.row_bytes = self._dtype.itemsize * (1 if width is None else width)
        self._record = np.dtype((np.void, self.row_bytes))
        self._memory = mmap.mmap(-1, _FIRST_ROWS * self.row_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.rows: NDArray[Any]
        self._records: NDArray[np.void]
        self._look()

    def reserve(self, count: int) -> None:
        """Make room for `count` rows. Capacity is doubled, so a row that is added moves a fixed number of times on
        average."""
        capacity = self.rows.shape[0]
        if count <= capacity:
            return
        while capacity < count:
            capacity *= 2
        del self.rows, self._records  # a mapping that has views cannot be moved
        try:
            self._memory.resize(capacity * self.row_bytes)
        except OSError as error:
            raise NotEnoughMemory(
                f"no memory for {count:,} rows of {self.row_bytes} bytes of a sparse table: {error}",
                hint="use more servers, or a host with more memory",
            ) from error
        finally:
            self._look()

    def gather(self, slots: NDArray[np.int64]) -> NDArray[Any]:
        """A copy of the rows in these slots; slots outside of the array give any row."""
        return self._records.take(slots, mode="clip").view(self._dtype).reshape(-1, *self._shape)

    def scatter(self, slots: NDArray[np.int64], rows: NDArray[Any]) -> None:
        """Write rows, which must be contiguous, into these slots."""
        write_rows(self._records, slots, rows)

    def _look(self) -> None:
        self.rows = np.frombuffer(self._memory, self._dtype).reshape(-1, *self._shape)
        self._records = np.frombuffer(self._memory, self._record)


def write_rows(array: NDArray[Any], places: NDArray[np.int64], rows: NDArray[Any]) -> None:
    """array[places] = rows, for contiguous arrays."""
    record = np.dtype((np.void, rows.itemsize * math.prod(rows.shape[1:])))
    np.put(array.reshape(-1).view(record), places, rows.reshape(-1).view(record))


ABSENT = -1
_MAXIMUM = 2**31 - 1  # slots are 32-bit numbers
_FIRST_PLACES = 2048


class RowSlots:
    """Row numbers and their slots.

    >>> slots = RowSlots()
    >>> slots.add(np.array([70, 30]))
    array([0, 1])
    >>> slots.find(np.array([30, 40, 70, 30]))
    array([ 1, -1,  0,  1])
    """

    def __init__(self) -> None:
        self.count = 0
        self._numbers = RowArray(None, np.int64)
        self._places = np.full(_FIRST_PLACES, ABSENT, np.int32)

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The row number of every slot."""
        return self._numbers.rows[: self.count]

    def find(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slot of every row, `ABSENT` where it has none."""
        mask = self._places.shape[0] - 1
        at = _home(rows, mask)
        slots = self._places.take(at).astype(np.int64)
        searching = np.flatnonzero(self._is_other(slots, rows))
        step = 0
        while searching.size:
            step += 1
            places = (at[searching] + step * (step + 1) // 2) & mask
            found = self._places.take(places).astype(np.int64)
            slots[searching] = found
            searching = searching[self._is_other(found, rows[searching])]
        return slots

    def add(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """New slots, in this order, for rows that have none. No row may be given twice."""
        count = self.count + rows.shape[0]
        if count > _MAXIMUM:
            raise DistBeliefError(
                f"more than {_MAXIMUM:,} rows of one sparse table on one server", hint="use more servers"
            )
        self._numbers.reserve(count)
        new = np.arange(self.count, count)
        self._numbers.rows[self.count : count] = rows
        self.count = count
        if 2 * count > self._places.shape[0]:
            size = self._places.shape[0]
            while size < 2 * count:
                size *= 2
            self._places = np.full(size, ABSENT, np.int32)
            self._place(np.arange(count))
        else:
            self._place(new)
        return new

    def _is_other(self, slots: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each place is taken by another row than the wanted row. (Slot -1 reads any number: the place is
        free.)"""
        other: NDArray[np.bool_] = (slots != ABSENT) & (self._numbers.rows.take(slots, mode="clip") != rows)
        return other

    def _place(self, slots: NDArray[np.int64]) -> None:
        """Add slots whose rows are not in the hash table yet."""
        mask = self._places.shape[0] - 1
        at = _home(self._numbers.rows[slots], mask)
        step = 0
        while slots.size:
            free = self._places.take(at) == ABSENT
            self._places[at[free]] = slots[free]
            left = np.flatnonzero(self._places.take(at) != slots)  # taken before, or by another new slot just now
            step += 1
            slots = slots[left]
            at = (at[left] + step) & mask


def _home(rows: NDArray[np.int64], mask: int) -> NDArray[np.int64]:
    home: NDArray[np.int64] = (mixed(rows) & np.uint64(mask)).view(np.int64)
    return home


class Table:
    """Rows of a sparse table. Only rows that were pushed to take memory.

    >>> from distbelief.strategies.tables.rowinit import RowInit
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
        """The number of stored rows."""
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
        """A copy of all stored rows, ascending: equal contents give equal bytes, whatever their history."""
        slots = np.argsort(self._slots.numbers)
        state = {name: torch.from_numpy(array.gather(slots)) for name, array in self._arrays.items()}
        return {"rows": torch.from_numpy(self._slots.numbers.take(slots)), **state}

    def numbers(self) -> NDArray[np.int64]:
        """The numbers of the stored rows, in the order in which they came."""
        return self._slots.numbers.copy()

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Replace all rows by these. A state that does not fit changes nothing."""
        self._check(state)
        self._empty()
        self._enter(state)

    def _empty(self) -> None:
        self._slots = RowSlots()
        self._arrays = {"values": RowArray(self.form.width, np.float32)}
        for field in self.optimizer.fields:
            self._arrays[field.name] = RowArray(self.form.width if field.wide else None, field.dtype)

    def _add(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Store rows with their initial values. No row may be stored already or be given twice."""
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
        """New slots. Memory is reserved first: if that fails, nothing has changed."""
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
        """Refuse a state of another table or another optimizer."""
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
