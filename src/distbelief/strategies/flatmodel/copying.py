"""Copies of the state for checkpoints, made while training goes on.

A state changes only when a step is applied. Until then, while the next step's shards are computed, a thread copies it
piece by piece (`Copy.run`). The training thread copies the rest itself before it writes to the state
(`finish_before_a_write`). So a copy is always the state after one step, and training hardly waits.

`TileCopies` is the part of a replica that makes such copies: each member copies its own tiles.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch

from distbelief.instrument import Instrument
from distbelief.strategies.base import Portion
from distbelief.strategies.flatmodel.compute import ShardComputer
from distbelief.strategies.flatmodel.namedtensors import TilePortion, outside_of_tiles, whole_entries
from distbelief.strategies.flatmodel.state import ReplicaState
from distbelief.strategies.flatmodel.tileoptimizer import Recipe
from distbelief.transport.exchange import Exchange
from distbelief.transport.shm.segment import Segment

TIMED = (Instrument("checkpoint", __name__, "Copy", ("finish_before_a_write",)),)

CopyPiece = Callable[[int, Segment, int], None]
"""(piece number, memory, first byte): copies the piece into the memory."""


class Copy:
    """An unfinished copy. See `Copying`."""

    def __init__(
        self, copy: CopyPiece, starts: Mapping[int, int], into: Segment, outside: Mapping[str, torch.Tensor]
    ) -> None:
        """`starts`: piece number -> its first byte in the copy."""
        self.outside = outside
        self.waited_s = 0.0
        self._copy = copy
        self._into = into
        self._left = list(starts.items())
        self._missing = len(self._left)
        self._lock = threading.Lock()
        self._done = threading.Event()
        if not self._left:
            self._done.set()

    def run(self) -> None:
        while True:
            with self._lock:
                if not self._left:
                    return
                piece, at_bytes = self._left.pop()
            self._copy(piece, self._into, at_bytes)
            with self._lock:
                self._missing -= 1
                if not self._missing:
                    self._done.set()

    def finish(self) -> None:
        self.run()
        self._done.wait()

    def finish_before_a_write(self) -> None:
        started = time.perf_counter()
        self.finish()
        self.waited_s += time.perf_counter() - started


class TileCopies:
    """The checkpoint part of a replica, which sets these attributes. Before it writes to the state, the replica calls
    `_finish_copies` if `_copies` is not empty."""

    model: torch.nn.Module
    exchange: Exchange
    _computer: ShardComputer
    _state: ReplicaState
    _recipe: Recipe
    _copies: list[Copy]
    """Copies that may not be complete yet."""

    def _finish_copies(self) -> None:
        while self._copies:
            self._copies.pop().finish_before_a_write()

    @cached_property
    def _portions(self) -> list[TilePortion]:
        """Each member saves the tiles that it owns, or would own in a shared state; rank 0 also saves tensors outside
        of tiles."""
        layout, size = self._computer.layout, self.exchange.size
        outside = whole_entries(self._outside(0))
        return [
            TilePortion(layout, self._recipe, range(rank, len(layout.tiles), size), outside if rank == 0 else [])
            for rank in range(size)
        ]

    def _outside(self, applied: int) -> dict[str, torch.Tensor]:
        return outside_of_tiles(self.model, self._computer.layout, self._state.integers(applied))

    def portions(self) -> Sequence[Portion]:
        return self._portions

    def copy_portion(self, applied: int, into: Segment) -> Copy:
        outside = self._outside(applied) if self.exchange.rank == 0 else {}
        copying = Copy(self._beside_steps(self._copier(applied)), self._piece_starts(), into, outside)
        self._copies.append(copying)
        return copying

    def _copier(self, applied: int) -> CopyPiece:
        """Returns the function that copies pieces of this member's portion of the state after `applied` steps."""
        return self._state.copy_tile

    def _piece_starts(self) -> Mapping[int, int]:
        """Piece number -> its first byte in this member's portion."""
        return self._portions[self.exchange.rank].starts

    def _beside_steps(self, copy: CopyPiece) -> CopyPiece:
        """The same function, made to run beside the computation (on a device: on a separate stream)."""
        return copy
