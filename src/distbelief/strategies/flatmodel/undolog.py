"""Where a member keeps the old bytes of the tile that it is updating, for whoever comes after it if it dies there."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from distbelief.transport.shm.segment import Segment


class Aside:
    """One member's place: | what it holds | the bytes |"""

    HEAD_BYTES = 64

    def __init__(self, segment: Segment) -> None:
        self._held = np.frombuffer(segment.buffer, np.int64, 2)
        self._at = segment.tensor(torch.uint8, self.HEAD_BYTES, segment.size_bytes - self.HEAD_BYTES)

    @property
    def holds(self) -> tuple[int, int]:
        """A tile, and which step it was about to take; -1: none. Of two members' places with the same in them either
        may be used: what a tile was before a step does not depend on who says so."""
        return int(self._held[0]) - 1, int(self._held[1])

    def copy(self, tile: int, step: int, current: Sequence[torch.Tensor]) -> None:
        self._held[0] = 0
        at = self._at.data_ptr()
        for part in current:
            # a third faster than Tensor.copy_ here: it does not read what it is about to overwrite
            ctypes.memmove(at, part.data_ptr(), part.numel())
            at += part.numel()
        self._held[1] = step
        self._held[0] = tile + 1

    def put_back(self, current: Sequence[torch.Tensor]) -> None:
        at = 0
        for part in current:
            part.copy_(self._at[at : at + part.numel()])
            at += part.numel()
