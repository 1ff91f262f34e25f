"""Tensors that are read when they are asked for, and only as much of them as is asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from distbelief.checkpoint import boxes
from distbelief.checkpoint.boxes import Box

Outline = tuple[torch.dtype, tuple[int, ...]]
"""What is known of a tensor without reading it."""

Wanted = tuple[str, Box]


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors by name. Iterating, `len` and `in` read nothing; every value is a new CPU tensor, read when it is asked
    for. To read many, `read_boxes` is the way: it goes through every file once."""

    def __init__(self, outlines: Mapping[str, Outline]) -> None:
        self.outlines = outlines

    @abstractmethod
    def read(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        """The wanted boxes, in that order. All or nothing; no more is held in memory than they and a few blocks."""

    def check(self, names: Iterable[str] | None = None) -> None:
        """Find out now whether these tensors, or all of them, are sound, as far as the files tell: raises what is not.
        It is not done again when they are read."""

    def read_boxes(self, wanted: Mapping[str, Box]) -> dict[str, torch.Tensor]:
        return dict(zip(wanted, self.read(list(wanted.items())), strict=True))

    def read_box(self, name: str, box: Box) -> torch.Tensor:
        return self.read([(name, box)])[0]

    def read_whole(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """All, or those named."""
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
        """Memory for a box."""
        dtype, shape = self.outlines[name]
        if not boxes.is_box_of(shape, box):
            raise ValueError(f"tensor '{name}' of shape {shape} has no box {boxes.shown(box)}")
        return torch.empty(boxes.sizes(box), dtype=dtype)


class Renamed(LazyTensors):
    """Some of the tensors of another, under other names; several names may mean the same one."""

    def __init__(self, inner: LazyTensors, names: Mapping[str, str]) -> None:
        """`names`: new name -> the other's."""
        super().__init__({name: inner.outlines[old] for name, old in names.items()})
        self._inner = inner
        self._names = names

    def check(self, names: Iterable[str] | None = None) -> None:
        self._inner.check(self._names[name] for name in (self if names is None else names))

    def read(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        """What is wanted under two names is one tensor."""
        asked = [(self._names[name], box) for name, box in wanted]
        once = list(dict.fromkeys(asked))
        found = dict(zip(once, self._inner.read(once), strict=True))
        return [found[one] for one in asked]


def outlines_of(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, Outline]:
    if isinstance(tensors, LazyTensors):
        return tensors.outlines
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
