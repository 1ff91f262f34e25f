"""The state of a replica in one block of memory, and the undo log that makes a commit atomic.

    | stamps | values: parameters, float buffers | optimizer state | undo copy of both |

Before a tile is updated its old bytes are copied to the undo part and its stamp says so; after the update the stamp
says that too. So whoever dies in the middle of a commit, the old values are there: `repair` puts them back, as if the
step had not begun to be applied. (docs/decisions/0001)
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from distbelief.comm.exchange import Exchange
from distbelief.comm.segment import Segment
from distbelief.strategies.layout import Layout
from distbelief.strategies.tileoptimizer import Recipe, state_bytes

_PAGE = 4096


class ReplicaState:
    """Views of that block. A stamp is 2t: before step t; 2t+1: its undo copy is whole, the tile may be torn."""

    def __init__(self, layout: Layout, recipe: Recipe, exchange: Exchange) -> None:
        self.layout = layout
        sizes = [state_bytes(recipe, layout, t) if t < layout.parameter_tiles else 0 for t in range(len(layout.tiles))]
        self.values_at = _pages(8 * (1 + len(layout.tiles)))
        optimizer_at = self.values_at + _pages(layout.size_bytes)
        undo_at = optimizer_at + _pages(sum(sizes))
        undo_bytes = undo_at - self.values_at if exchange.shares_state else 0
        self.segment: Segment = exchange.state(undo_at + undo_bytes)
        self._stamps = np.frombuffer(self.segment.buffer, np.int64, 1 + len(layout.tiles))
        self.values = [self.segment.tensor(t.dtype, self.values_at + t.offset_bytes, t.numel) for t in layout.tiles]
        self.optimizer = []
        self._current: list[list[torch.Tensor]] = []
        self._undo: list[list[torch.Tensor]] = []
        shift = undo_at - self.values_at
        for tile, size_bytes in zip(layout.tiles, sizes, strict=True):
            self.optimizer.append(self.segment.tensor(torch.uint8, optimizer_at, size_bytes))
            stretches = [(self.values_at + tile.offset_bytes, tile.size_bytes), (optimizer_at, size_bytes)]
            stretches = [(at, size) for at, size in stretches if size]
            self._current.append([self.segment.tensor(torch.uint8, at, size) for at, size in stretches])
            if undo_bytes:
                self._undo.append([self.segment.tensor(torch.uint8, at + shift, size) for at, size in stretches])
            optimizer_at += size_bytes

    @property
    def initialised(self) -> bool:
        return bool(self._stamps[0])

    def mark_initialised(self) -> None:
        self._stamps[0] = 1

    @property
    def steps_applied(self) -> int:
        """Steps that every tile has behind it."""
        return int(self._stamps[1:].min()) // 2

    def open(self, tile: int, step: int) -> None:
        """From here to `close` the tile may be torn; its old bytes are safe first."""
        if self._undo:
            for copy, current in zip(self._undo[tile], self._current[tile], strict=True):
                # a third faster than Tensor.copy_ here: it does not read what it is about to overwrite
                ctypes.memmove(copy.data_ptr(), current.data_ptr(), current.numel())
        self._stamps[1 + tile] = 2 * step + 1

    def close(self, tile: int, step: int) -> None:
        self._stamps[1 + tile] = 2 * step + 2

    def repair(self) -> list[int]:
        """Undo a step that was applied in part: put back the old bytes of every tile that is torn or ahead.

        The undo copy of a tile that has the step behind it is still that of before the step: the next step opens no
        tile before all have closed this one. Returns the tiles. Nobody else may be writing.
        """
        applied = 2 * self.steps_applied
        ahead = [t for t in range(len(self.layout.tiles)) if int(self._stamps[1 + t]) > applied]
        for tile in ahead:
            for copy, current in zip(self._undo[tile], self._current[tile], strict=True):
                current.copy_(copy)
            self._stamps[1 + tile] = applied
        return ahead


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE
