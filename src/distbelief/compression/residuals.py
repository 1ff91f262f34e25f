"""What one member has not sent yet: a vector over the whole layout, kept twice, so that a step can be taken again.

A step reads the residual of the state that it begins from and writes the one of the state that it leads to. Each copy
says to how many applied steps it belongs. So a step that is aborted has consumed nothing, and a member that learns that
others have applied the step has what goes with that. Where neither copy belongs to the state, the residual is lost, and
begins at zero.

A tile's residual is one number per element, whoever owns the tile: what I did not send of my part of it, or of its sum
if that is mine to send. Both are still to be added to a sum, so nothing is to be moved when owners change.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import numpy as np
import torch
from torch import Tensor

from distbelief.transport.shm.segment import Memory, Segment

_HEAD = 4096
_NAME = "residuals"


class Residuals:
    """
    >>> residuals = Residuals({}, elements=3)
    >>> residuals.begin(0)
    False
    >>> _ = residuals.after.copy_(torch.tensor([1.0, 0.0, 2.0]))
    >>> residuals.written()
    >>> residuals.begin(0), residuals.before.tolist()
    (True, [0.0, 0.0, 0.0])
    >>> residuals.written()
    >>> residuals.begin(1)
    True
    """

    def __init__(
        self, memory: MutableMapping[str, Segment], elements: int, further: int = 0, vectors: Memory | None = None
    ) -> None:
        """`memory`: what this process keeps from one generation to the next. `further`: elements after those of the
        layout that belong to the same state. `vectors`: where both copies are, if on a device; kept as long."""
        self.elements = elements
        self._whole = elements + further
        if _NAME not in memory:
            memory[_NAME] = Segment.private(_HEAD + (0 if vectors else 8 * self._whole))
        segment = memory[_NAME]
        room, first = (vectors, 0) if vectors else (segment, _HEAD)
        self._labels = np.frombuffer(segment.buffer, np.int64, 2)
        """Steps applied, plus one; 0: nothing is there."""
        self._bytes = np.frombuffer(segment.buffer, np.int64, 2, 16)
        self._vectors = [room.tensor(torch.float32, first + 4 * self._whole * i, self._whole) for i in (0, 1)]
        self._zero = [False, False]
        self._now = 0
        self._step = -1

    @property
    def before(self) -> Tensor:
        """That of the state that the step begins from, with what is `further`."""
        return self._vectors[self._now]

    @property
    def after(self) -> Tensor:
        """That of the state that the step leads to; to be written."""
        return self._vectors[1 - self._now]

    @property
    def vectors(self) -> list[Tensor]:
        """Both copies, in the order of `present`."""
        return self._vectors

    @property
    def present(self) -> int:
        """Which of the two copies `before` is."""
        return self._now

    def begin(self, step: int) -> bool:
        """A step begins from the state after so many steps. False: there was no residual of that state."""
        self._step = step
        found = [i for i in (0, 1) if self._labels[i] == step + 1]
        if found:
            self._now = found[0]
        else:
            self._now = 0
            self._vectors[0].zero_()
            self._zero[0] = True
            self._labels[0] = step + 1
        self._labels[1 - self._now] = 0
        return bool(found)

    def wrote(self) -> None:
        """`after` is not zero any more."""
        self._zero[1 - self._now] = False

    def written(self) -> None:
        """`after` is whole: whoever applies the step has had all that it says was sent."""
        self._labels[1 - self._now] = self._step + 2

    def keep(self, part: slice) -> None:
        """Nothing was sent of this part, or it was not used."""
        self.after[part].copy_(self.before[part])
        self.wrote()

    def release(self) -> bool:
        """All of it goes out with this step, uncompressed. False: there was nothing."""
        if not self._zero[1 - self._now]:
            self.after[: self.elements].zero_()
            self._zero[1 - self._now] = True
        self.after[self.elements :].copy_(self.before[self.elements :])
        return not self._zero[self._now]

    def at(self, applied: int) -> Tensor | None:
        """That of the state after so many steps, if it is known."""
        found = [i for i in (0, 1) if self._labels[i] == applied + 1]
        return self._vectors[found[0]] if found else None

    def put(self, applied: int, vector: Tensor) -> None:
        """Go on from this one, at the state after so many steps."""
        self._vectors[0].copy_(vector)
        self._zero = [False, False]
        self._labels[:] = (applied + 1, 0)

    # --- what went over the wire is counted for as long as this memory is kept ----------------------------------------

    def count(self, wire_bytes: int, plain_bytes: int) -> None:
        self._bytes += (wire_bytes, plain_bytes)

    @property
    def traffic(self) -> tuple[int, int]:
        """(bytes sent, bytes that would have been sent uncompressed)."""
        return int(self._bytes[0]), int(self._bytes[1])
