"""The map from row numbers to slots: an open-addressing hash table, searched for thousands of rows at once.

A slot is a place in a table's arrays; rows get slots 0, 1, 2… as they are added, and keep them. The hash table holds
slots only (4 bytes each); the row number that a slot stands for is in `numbers`. A search looks at the home of every
row in one pass, then at the next places of those that found somebody else there: a few passes over ever fewer rows
instead of a loop over rows. Nothing here depends on the order of anything but the calls.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distbelief.errors import DistBeliefError
from distbelief.strategies.ps.tables.rowarrays import RowArray
from distbelief.strategies.ps.tables.rowbuckets import mixed

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
        """Where a place is taken by another row than the one looked for. (Slot -1 reads any number: it is free.)"""
        other: NDArray[np.bool_] = (slots != ABSENT) & (self._numbers.rows.take(slots, mode="clip") != rows)
        return other

    def _place(self, slots: NDArray[np.int64]) -> None:
        """Enter slots whose rows are not in the hash table yet."""
        mask = self._places.shape[0] - 1
        at = _home(self._numbers.rows[slots], mask)
        step = 0
        while slots.size:
            free = self._places.take(at) == ABSENT
            self._places[at[free]] = slots[free]
            left = np.flatnonzero(self._places.take(at) != slots)  # taken before, or by another of these just now
            step += 1
            slots = slots[left]
            at = (at[left] + step) & mask


def _home(rows: NDArray[np.int64], mask: int) -> NDArray[np.int64]:
    home: NDArray[np.int64] = (mixed(rows) & np.uint64(mask)).view(np.int64)
    return home
