"""Delay compensation: a gradient that is late is corrected for the way that the parameters have gone meanwhile.

Zheng et al. 2017 (DC-ASGD): the first-order term of the gradient at the present values, with g ⊙ g in place of the
Hessian. The values that the gradient was computed with come along with it: so servers keep no copy per worker, and what
a slice becomes is a function of its changes alone, whoever is primary.


One slice of a run's parameters when workers wait for nobody: each update is applied as it comes.

It is a `Store` (see holding.py): primary and backup apply the same updates in the same order.
"""

from __future__ import annotations

import numpy as np
import torch

from distbelief.errors import DistBeliefError
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import (
    Gradient,
    Note,
    PulledValues,
    PullValues,
    PushResult,
    Question,
    ReadState,
    SliceState,
)
from distbelief.strategies.ps.protocol.pushcoding import PushCoding
from distbelief.strategies.ps.server.slicememory import OpenSegment, SliceMemory, gradient_and_values, with_bytes
from distbelief.strategies.ps.server.stores import Change, Snapshot, State


def compensate(gradient: torch.Tensor, now: torch.Tensor, then: torch.Tensor, strength: float) -> None:
    """g + λ g ⊙ g ⊙ (w_now − w_then), in place. Where a value has not moved, the gradient keeps its bits.

    >>> g = torch.tensor([2.0, 2.0, -0.0])
    >>> compensate(g, now=torch.tensor([1.5, 1.0, 1.0]), then=torch.ones(3), strength=0.1)
    >>> g
    tensor([2.2000, 2.0000, -0.0000])
    """
    if torch.equal(now, then):
        return
    moved = now - then
    corrected = torch.addcmul(gradient, gradient * gradient, moved, value=strength)
    gradient.copy_(torch.where(moved == 0, gradient, corrected))


class AsynchronousSlice:
    def __init__(
        self, memory: SliceMemory, open_segment: OpenSegment, delay: float = 0.0, coding: PushCoding | None = None
    ) -> None:
        """`delay`: how strongly late gradients are corrected (delay.py). `coding`: how updates may be compressed."""
        self.memory = memory
        self.version = 0
        """Updates applied in this life."""
        self._open = open_segment
        self._delay = delay
        self._coding = coding
        self._integers = np.zeros(0, np.int64)
        tiles = memory.layout.tiles
        self._scratch = {t: torch.empty(tiles[t].numel, dtype=tiles[t].dtype) for t in memory.shape.tiles}

    def begin(self, contents: torch.Tensor, integers: np.ndarray) -> None:
        """The first state of a life."""
        self.memory.load(contents, 0)
        self._integers = integers.copy()

    # --- as a store --------------------------------------------------------------------------------------------------

    def apply(self, change: Change) -> None:
        match change.content:
            case Gradient():
                self._update(change.content, change)
            case Note():
                pass  # the ledger keeps it

    def _update(self, update: Gradient, change: Change) -> None:
        memory, values = self.memory, list[torch.Tensor]()
        if update.coded:
            if self._coding is None:
                raise DistBeliefError("an update is compressed, and the strategy does not say how")
            self._coding.read(change.payload, self._scratch)
        else:
            parts, values = gradient_and_values(memory.shape, memory.layout, update, change.payload, self._open)
            for tile, part in zip(memory.shape.tiles, parts, strict=True):
                self._scratch[tile].copy_(part)  # an optimizer may overwrite it, and a backup reads it too
        for tile, then in zip(memory.parameter_tiles, values, strict=False):  # those of buffers come last
            compensate(self._scratch[tile], memory.values[tile], then, self._delay)
        untouched = np.frombuffer(update.touched, np.uint8) == 0
        self.memory.update_freely(update.step, self.version, self._scratch, untouched)
        if update.integers:
            self._integers += np.frombuffer(update.integers, np.int64)
        self.version += 1

    def state(self) -> State:
        return Snapshot(self.version, self._integers.tobytes()), self.memory.contents()

    def load(self, state: State) -> None:
        snapshot, content = state
        self.memory.load(content, snapshot.version)
        self.version = snapshot.version
        self._integers = np.frombuffer(snapshot.about, np.int64).copy()

    def with_bytes(self, change: Change) -> Change:
        return with_bytes(self.memory.shape, change, self._open)

    # --- what is asked of it -----------------------------------------------------------------------------------------

    def given(self, client: int) -> PushResult | None:
        return None

    def reply(self, question: Question, segment: str, everywhere: bool, caught_up: bool) -> Framed | None:
        """Values are given as they are at the moment: a worker copies them while others may change them."""
        match question:
            case ReadState():
                if not caught_up:
                    return None
                return Framed(SliceState(question.ticket, question.slice, self.version), self.memory.contents().numpy())
            case PullValues():
                segment = "" if question.inline else segment
                integers = self._integers.tobytes() if question.slice == 0 else b""
                header = PulledValues(question.ticket, question.slice, self.version, b"", integers, segment)
                return Framed(header, None if segment else self.memory.value_view())
            case _:
                raise DistBeliefError(f"a slice of an asynchronous run is not asked {type(question).__name__}")
