"""What each member of a mesh writes to a checkpoint: the boxes that it holds, and of replicated ones its share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from distbelief.checkpoint.boxes import Box, sizes, volume
from distbelief.checkpoint.manifest import PartEntry
from distbelief.checkpoint.parts import Slice, dtype_name
from distbelief.checkpoint.sources import MODEL
from distbelief.strategies.flatmodel.copying import Copy
from distbelief.strategies.flatmodel.named import OWED
from distbelief.strategies.mesh.rules.boxes import writers
from distbelief.strategies.mesh.state.livestate import LiveState
from distbelief.strategies.mesh.state.snapshots import Forms
from distbelief.transport.shm.segment import Segment

_ALIGN = 64


@dataclass(frozen=True)
class MeshPortion:
    """See `Portion`."""

    boxes: Mapping[str, Box]
    forms: Forms
    starts: Mapping[str, int]
    """Tensor -> the byte of the copy at which it starts; the others are small, and go beside it."""
    size_bytes: int

    def entries(self) -> list[PartEntry]:
        return [
            PartEntry.of_box(name, dtype_name(self.forms[name][0]), self.forms[name][1], box)
            for name, box in self.boxes.items()
        ]

    def slices(self, copy: Segment, outside: Mapping[str, torch.Tensor]) -> list[Slice]:
        found = []
        for name, box in self.boxes.items():
            dtype, shape = self.forms[name]
            if name in self.starts:
                values = copy.tensor(dtype, self.starts[name], volume(box)).view(sizes(box))
            else:
                values = outside[name]
            found.append(Slice.of_box(name, values, shape, box))
        return found


def portions(held: Sequence[Mapping[str, Box]], forms: Forms) -> list[MeshPortion]:
    """By rank."""
    found = []
    for boxes, mine in zip(held, writers(held), strict=True):
        starts: dict[str, int] = {}
        at = 0
        for name, box in boxes.items():
            if name in mine and _is_large(name, forms):
                starts[name] = at
                at += -(-volume(box) * forms[name][0].itemsize // _ALIGN) * _ALIGN
        found.append(MeshPortion({name: box for name, box in boxes.items() if name in mine}, forms, starts, at))
    return found


def _is_large(name: str, forms: Forms) -> bool:
    """Parameters and their state: these are written to only when a step is applied. Buffers change before that."""
    if name.startswith(MODEL):
        return f"begun/{name.removeprefix(MODEL)}" in forms
    return name.startswith(("optimizer/", OWED)) and bool(forms[name][1])


def copy_of(portion: MeshPortion, state: LiveState, owed: Mapping[str, torch.Tensor], into: Segment) -> Copy:
    """A copy of the present state, to be made while the next step is computed."""
    tensors = {name: values for name, (_, values) in state.tensors().items() if name in portion.boxes}
    tensors |= {name: values for name, values in owed.items() if name in portion.boxes}
    names = list(portion.starts)

    def copy(number: int, into: Segment, at_bytes: int) -> None:
        values = tensors[names[number]]
        into.tensor(values.dtype, at_bytes, values.numel()).copy_(values.reshape(-1))

    outside = {name: values.clone() for name, values in tensors.items() if name not in portion.starts}
    return Copy(copy, {number: portion.starts[name] for number, name in enumerate(names)}, into, outside)
