"""A copy of a state that is made while training goes on.

A state is written to only when a step is applied. Until then, while the next step's shards are computed, a thread can
copy it, piece by piece; what it has not copied by then the training thread copies itself, before it writes. So the copy
is always that of one step, and training hardly waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import torch

from distbelief.transport.shm.segment import Segment

CopyPiece = Callable[[int, Segment, int], None]
"""Copies the piece of that number into memory, from that byte on."""


class Copy:
    """See `Copying`."""

    def __init__(
        self, copy: CopyPiece, starts: Mapping[int, int], into: Segment, outside: Mapping[str, torch.Tensor]
    ) -> None:
        """`starts`: piece -> its first byte in the copy."""
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
