"""Copying a table to a new backup in pieces, while pushes go on.

A piece is all there is of a range of row numbers, as of the moment it is cut. Pieces come in ascending order, so at any
time the copy has everything below a frontier. A push that comes between two pieces is sent on as it is: the copy
applies what lies below the frontier, and leaves the rest, which the pieces still to come will hold already. That is
exact because the bits of a row depend on its own gradients only. Pieces and pushes must reach the copy in the order
in which the original cut and applied them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from distbelief.errors import DistBeliefError
from distbelief.servers.tables import Table


@dataclass(frozen=True)
class Piece:
    """The resident rows among `first` ≤ row number < `end`."""

    first: int
    end: int
    state: dict[str, torch.Tensor]


class TableCopy:
    """The side of the original. Between two calls of `next`, pushes may change the table.

    >>> from distbelief.strategies.rowinit import TableForm
    >>> from distbelief.strategies.rowoptimizers import RowOptimizer
    >>> original = Table(TableForm("words", rows=1000, width=4), RowOptimizer("adam", lr=0.1))
    >>> original.push(torch.tensor([5, 900, 30]), torch.ones(3, 4))
    >>> copy = TableCopy(original, piece_rows=2)
    >>> [(piece.first, piece.end, piece.state["rows"].tolist()) for piece in copy]
    [(0, 900, [5, 30]), (900, 1000, [900])]
    """

    def __init__(self, table: Table, piece_rows: int) -> None:
        if piece_rows < 1:
            raise DistBeliefError(f"a table cannot be copied in pieces of {piece_rows} rows", hint="at least 1")
        self._table = table
        self._piece_rows = piece_rows
        self._frontier = 0
        # Sorted once; rows that become resident while the copy goes on have later slots, and are few.
        numbers = table.numbers_from(0)
        self._order = np.argsort(numbers)
        self._sorted = numbers.take(self._order)
        self._at = 0

    def __iter__(self) -> TableCopy:
        return self

    def __next__(self) -> Piece:
        """The next piece, of at most so many rows. There is always at least one, also of an empty table."""
        if self._frontier == self._table.form.rows:
            raise StopIteration
        known, upto = len(self._order), self._at + self._piece_rows
        end = int(self._sorted[upto]) if upto < known else self._table.form.rows
        since = self._table.numbers_from(known)
        new = np.flatnonzero((since >= self._frontier) & (since < end))
        numbers = np.concatenate([self._sorted[self._at : upto], since[new]])
        ascending = np.argsort(numbers)
        slots = np.concatenate([self._order[self._at : upto], known + new])[ascending]
        if len(slots) > self._piece_rows:
            end = int(numbers[ascending[self._piece_rows]])
            slots = slots[: self._piece_rows]
        piece = Piece(self._frontier, end, self._table.state_of(slots))
        self._at = int(np.searchsorted(self._sorted, end))
        self._frontier = end
        return piece


class ArrivingTable:
    """The side of the copy: a new table, empty at first, that is `complete` after the last piece."""

    def __init__(self, table: Table) -> None:
        if table.resident:
            raise DistBeliefError(
                f"table '{table.form.name}' holds {table.resident:,} rows: a copy of it cannot arrive there",
                hint="give the copy a new, empty table",
            )
        self.table = table
        self.frontier = 0

    @property
    def complete(self) -> bool:
        return self.frontier == self.table.form.rows

    def take(self, piece: Piece) -> None:
        """Enter the next piece."""
        if piece.first != self.frontier:
            raise DistBeliefError(
                f"a copy of table '{self.table.form.name}' was to continue at row {self.frontier:,},"
                f" but a piece came that begins at row {piece.first:,}",
                hint="start the copy again: a piece was lost, or came twice",
            )
        self.table.add(piece.state)
        self.frontier = piece.end

    def push(self, rows: torch.Tensor, gradients: torch.Tensor, factor: float = 1.0) -> None:
        """Apply what concerns rows that have arrived."""
        arrived = rows < self.frontier
        self.table.push(rows[arrived], gradients[arrived], factor)
