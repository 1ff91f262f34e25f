"""From the bytes of an entry, as they come, into a tensor for the box that is wanted.

An entry is a stretch of a tensor or a box of it, and what arrives of it in a block is a stretch again. All are taken
apart into boxes, and what those have in common with the wanted one is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from distbelief.checkpoint import boxes
from distbelief.checkpoint.boxes import Box
from distbelief.checkpoint.parts import memory_of

GAP_BYTES = 1 << 18  # what lies between two spans and is shorter is read along: quicker than another request

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # copying knows nothing of types


@dataclass(frozen=True)
class Extent:
    """Where an entry lies in its tensor: elements `first` to `first + count` of a box, in the order of that box."""

    frame: Box
    first: int
    count: int

    @classmethod
    def of(cls, shape: Sequence[int], first: int, count: int, box: Box | None) -> Extent:
        return cls(boxes.whole(shape), first, count) if box is None else cls(box, 0, count)

    def boxes(self, start: int, count: int) -> list[Box]:
        """So many of its elements, from its own `start` on, as boxes of the tensor, in order."""
        corner = tuple((-low, -low) for low, _ in self.frame)
        found = boxes.boxes_of(boxes.sizes(self.frame), self.first + start, count)
        return [boxes.within(box, corner) for box in found]

    def touches(self, wanted: Box) -> bool:
        return any(boxes.common(box, wanted) is not None for box in self.boxes(0, self.count))

    def spans(self, wanted: Box, gap: int) -> Iterator[tuple[int, int]]:
        """Which of its elements to read for a box, from 0; more where less than `gap` of them lie in between."""
        shared = boxes.common(self.frame, wanted)
        if shared is None:
            return
        for start, end in boxes.spans_of(boxes.sizes(self.frame), boxes.within(shared, self.frame), gap):
            start, end = max(start - self.first, 0), min(end - self.first, self.count)
            if start < end:
                yield start, end


class Filling:
    """A `Sink` that puts what is wanted of an entry into its place in `into`, which has the wanted box's shape."""

    def __init__(self, extent: Extent, wanted: Box, into: torch.Tensor) -> None:
        self._extent = extent
        self._wanted = wanted
        self._width = into.element_size()
        self._raw = into.view(_RAW[self._width])
        self._memory = memory_of(into)
        self._one_piece = self._as_one_piece()

    def _as_one_piece(self) -> tuple[int, int] | None:
        """First and end, in the frame's order, of a wanted box that lies in it as a single stretch."""
        frame = self._extent.frame
        if boxes.common(frame, self._wanted) != self._wanted:
            return None
        stretch = boxes.stretch_of(boxes.sizes(frame), boxes.within(self._wanted, frame))
        return stretch and (stretch[0], stretch[0] + stretch[1])

    def spans(self) -> Iterator[tuple[int, int]]:
        """The bytes of the entry that have to be read."""
        for start, end in self._extent.spans(self._wanted, GAP_BYTES // self._width):
            yield start * self._width, end * self._width

    def room(self, start: int, end: int) -> memoryview | None:
        if self._one_piece is None:
            return None
        first, upto = (self._extent.first + at // self._width for at in (start, end))
        low, high = self._one_piece
        if first < low or upto > high:
            return None
        return self._memory[(first - low) * self._width : (upto - low) * self._width]

    def put(self, start: int, block: memoryview) -> None:
        values = torch.frombuffer(block, dtype=self._raw.dtype)
        at = 0
        for box in self._extent.boxes(start // self._width, len(values)):
            count = boxes.volume(box)
            if (shared := boxes.common(box, self._wanted)) is not None:
                arrived = values[at : at + count].view(boxes.sizes(box))[boxes.inside(shared, box)]
                self._raw[boxes.inside(shared, self._wanted)].copy_(arrived)
            at += count
