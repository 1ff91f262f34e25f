"""The part of its gradients that one member has not sent yet: one vector over the whole layout, in two copies, so that
a step can be repeated.

A step reads the residual of the state before the step and writes the residual of the state after it. Each copy is
labelled with its number of applied steps. So an aborted step consumes nothing, and a member that learns that others
have applied the step has the matching residual. If neither copy belongs to the state, the residual is lost and starts
at zero.

A tile's residual is one number per element, whatever member owns the tile: the unsent rest of this member's part of the
tile, or of the tile's sum if this member owns it. Both rests still have to be added to a sum, so nothing moves when
owners change.
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
    >>> residuals.mark_complete()
    >>> residuals.begin(0), residuals.before.tolist()
    (True, [0.0, 0.0, 0.0])
    >>> residuals.mark_complete()
    >>> residuals.begin(1)
    True
    """

    def __init__(
        self, memory: MutableMapping[str, Segment], elements: int, further: int = 0, vectors: Memory | None = None
    ) -> None:
        """`memory`: segments that this process keeps from one generation to the next. `further`: additional elements
        after those of the layout, of the same state. `vectors`: memory for both copies on a device; it lives as long as
        `memory`."""
        self.elements = elements
        self._whole = elements + further
        if _NAME not in memory:
            memory[_NAME] = Segment.private(_HEAD + (0 if vectors else 8 * self._whole))
        segment = memory[_NAME]
        room, first = (vectors, 0) if vectors else (segment, _HEAD)
        self._labels = np.frombuffer(segment.buffer, np.int64, 2)
        """For each copy, its number of applied steps plus one; 0: the copy is empty."""
        self._bytes = np.frombuffer(segment.buffer, np.int64, 2, 16)
        self._vectors = [room.tensor(torch.float32, first + 4 * self._whole * i, self._whole) for i in (0, 1)]
        self._zero = [False, False]
        self._now = 0
        self._step = -1

    @property
    def before(self) -> Tensor:
        """The residual of the state before the step, with the `further` elements."""
        return self._vectors[self._now]

    @property
    def after(self) -> Tensor:
        """The residual of the state after the step; the step writes it."""
        return self._vectors[1 - self._now]

    @property
    def vectors(self) -> list[Tensor]:
        """Both copies; `present` is the index of `before`."""
        return self._vectors

    @property
    def present(self) -> int:
        """The index of the copy that `before` returns."""
        return self._now

    def begin(self, step: int) -> bool:
        """Begin step `step`. Returns False if no copy belongs to the state before that step; `before` is then zero."""
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

    def mark_nonzero(self) -> None:
        """Record that `after` is no longer zero."""
        self._zero[1 - self._now] = False

    def mark_complete(self) -> None:
        """Record that `after` is complete: from now on a member that applies the step can rely on it."""
        self._labels[1 - self._now] = self._step + 2

    def keep(self, part: slice) -> None:
        """Copy this slice of the residual unchanged: nothing of it was sent, or nobody used it."""
        self.after[part].copy_(self.before[part])
        self.mark_nonzero()

    def release(self) -> bool:
        """Clear the residual of the layout, because this step sends it uncompressed. Returns False if the residual was
        zero."""
        if not self._zero[1 - self._now]:
            self.after[: self.elements].zero_()
            self._zero[1 - self._now] = True
        self.after[self.elements :].copy_(self.before[self.elements :])
        return not self._zero[self._now]

    def at(self, applied: int) -> Tensor | None:
        """The residual of the state after `applied` steps, or None."""
        found = [i for i in (0, 1) if self._labels[i] == applied + 1]
        return self._vectors[found[0]] if found else None

    def put(self, applied: int, vector: Tensor) -> None:
        """Replace the residual by `vector`, at the state after `applied` steps."""
        self._vectors[0].copy_(vector)
        self._zero = [False, False]
        self._labels[:] = (applied + 1, 0)

    # --- traffic counters, as long as the memory is kept --------------------------------------------------------------

    def count(self, wire_bytes: int, plain_bytes: int) -> None:
        self._bytes += (wire_bytes, plain_bytes)

    @property
    def traffic(self) -> tuple[int, int]:
        """(bytes sent, bytes that would have been sent uncompressed)."""
        return int(self._bytes[0]), int(self._bytes[1])
