"""Tensors that are read on first use, whole or only the requested boxes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from distbelief.checkpoint.parts import memory_of
from distbelief.checkpoint.rules import boxes
from distbelief.checkpoint.rules.boxes import Box

Outline = tuple[torch.dtype, tuple[int, ...]]
"""The type and shape of a tensor, known without reading it."""

Wanted = tuple[str, Box]


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors by name. Iteration, `len` and `in` read nothing; each value is a new CPU tensor, read on access. Use
    `read_boxes` to read many tensors: it reads through every file once."""

    def __init__(self, outlines: Mapping[str, Outline]) -> None:
        self.outlines = outlines

    @abstractmethod
    def read(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        """Read the wanted boxes, in the given order. Raises if any box cannot be read. Uses memory for the boxes and a
        few blocks."""

    def check(self, names: Iterable[str] | None = None) -> None:
        """Check these tensors, or all of them, as far as the files allow it; raises an error about the first fault.
        Later reads do not check them again."""

    def read_boxes(self, wanted: Mapping[str, Box]) -> dict[str, torch.Tensor]:
        return dict(zip(wanted, self.read(list(wanted.items())), strict=True))

    def read_box(self, name: str, box: Box) -> torch.Tensor:
        return self.read([(name, box)])[0]

    def read_whole(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Read all tensors, or the named ones."""
        return self.read_boxes({name: self._whole(name) for name in (self if names is None else names)})

    def _whole(self, name: str) -> Box:
        return boxes.whole(self.outlines[name][1])

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.read_box(name, self._whole(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.outlines)

    def __len__(self) -> int:
        return len(self.outlines)

    def __contains__(self, name: object) -> bool:
        return name in self.outlines

    def blank(self, name: str, box: Box) -> torch.Tensor:
        """Uninitialised memory for a box."""
        dtype, shape = self.outlines[name]
        if not boxes.is_box_of(shape, box):
            raise ValueError(f"tensor '{name}' of shape {shape} has no box {boxes.shown(box)}")
        return torch.empty(boxes.sizes(box), dtype=dtype)


class Renamed(LazyTensors):
    """Tensors of another `LazyTensors` under other names; several names may mean the same tensor."""

    def __init__(self, inner: LazyTensors, names: Mapping[str, str]) -> None:
        """`names`: new name -> name in `inner`."""
        super().__init__({name: inner.outlines[old] for name, old in names.items()})
        self._inner = inner
        self._names = names

    def check(self, names: Iterable[str] | None = None) -> None:
        self._inner.check(self._names[name] for name in (self if names is None else names))

    def read(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        """Read the wanted boxes; a tensor that is wanted under two names is read once."""
        asked = [(self._names[name], box) for name, box in wanted]
        once = list(dict.fromkeys(asked))
        found = dict(zip(once, self._inner.read(once), strict=True))
        return [found[one] for one in asked]


def outlines_of(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, Outline]:
    if isinstance(tensors, LazyTensors):
        return tensors.outlines
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


# --- from an entry's bytes into a tensor --------------------------------------------------------------------------

GAP_BYTES = 1 << 18  # shorter gaps between two spans are read too: quicker than another request

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # a copy needs the element's size only


@dataclass(frozen=True)
class Extent:
    """The place of an entry in its tensor: elements `first` to `first + count` of a box, in the box's own order."""

    frame: Box
    first: int
    count: int

    @classmethod
    def of(cls, shape: Sequence[int], first: int, count: int, box: Box | None) -> Extent:
        return cls(boxes.whole(shape), first, count) if box is None else cls(box, 0, count)

    def boxes(self, start: int, count: int) -> list[Box]:
        """Elements `start` to `start + count` of the entry as boxes of the tensor, in order."""
        corner = tuple((-low, -low) for low, _ in self.frame)
        found = boxes.boxes_of(boxes.sizes(self.frame), self.first + start, count)
        return [boxes.within(box, corner) for box in found]

    def touches(self, wanted: Box) -> bool:
        return any(boxes.common(box, wanted) is not None for box in self.boxes(0, self.count))

    def spans(self, wanted: Box, gap: int) -> Iterator[tuple[int, int]]:
        """Spans of the entry's elements to read for a box, counted from 0. A gap shorter than `gap` is read too."""
        shared = boxes.common(self.frame, wanted)
        if shared is None:
            return
        for start, end in boxes.spans_of(boxes.sizes(self.frame), boxes.within(shared, self.frame), gap):
            start, end = max(start - self.first, 0), min(end - self.first, self.count)
            if start < end:
                yield start, end


class Filling:
    """A `Sink` that copies the wanted elements of an entry into `into`, a tensor of the wanted box's shape."""

    def __init__(self, extent: Extent, wanted: Box, into: torch.Tensor) -> None:
        self._extent = extent
        self._wanted = wanted
        self._width = into.element_size()
        self._raw = into.view(_RAW[self._width])
        self._memory = memory_of(into)
        self._one_piece = self._as_one_piece()

    def _as_one_piece(self) -> tuple[int, int] | None:
        """First and end of the wanted box in the frame's order, if the box is a single stretch of the frame."""
        frame = self._extent.frame
        if boxes.common(frame, self._wanted) != self._wanted:
            return None
        stretch = boxes.stretch_of(boxes.sizes(frame), boxes.within(self._wanted, frame))
        return stretch and (stretch[0], stretch[0] + stretch[1])

    def spans(self) -> Iterator[tuple[int, int]]:
        """The bytes of the entry that must be read."""
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
