"""Saves a mesh: each member writes a portion of each checkpoint; at the end rank 0 writes the whole weights.

In a checkpoint each member writes boxes that it holds; members with the same box share the work. The whole weights are
sent to rank 0 one tensor at a time, so no member ever has all of them in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from distbelief.atomicfile import ROOM_WAIT_S
from distbelief.checkpoint.manifest import PartEntry
from distbelief.checkpoint.parts import Slice, dtype_name
from distbelief.checkpoint.rules.boxes import Box, sizes, volume, whole
from distbelief.checkpoint.sources import MODEL
from distbelief.checkpoint.weights import weights_sha256_of, write_weights
from distbelief.strategies.flatmodel.copying import Copy
from distbelief.strategies.flatmodel.namedtensors import OWED
from distbelief.strategies.mesh.rules.boxes import Holding, moves, writers
from distbelief.strategies.mesh.state.member import MeshMember, transfer_boxes
from distbelief.strategies.mesh.state.memberstate import Forms, MemberState
from distbelief.transport.shm.segment import Segment

# --- checkpoints -----------------------------------------------------------------------------------------------------

_ALIGN = 64


@dataclass(frozen=True)
class MeshPortion:
    """See `Portion`."""

    boxes: Mapping[str, Box]
    forms: Forms
    starts: Mapping[str, int]
    """For each large tensor, the byte of the copy at which it starts. Small tensors are kept beside the copy."""
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
    """Every member's portion, by rank."""
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
    """Whether a tensor is a parameter or its optimizer state. Those change only when a step is applied; buffers change
    earlier."""
    if name.startswith(MODEL):
        return f"begun/{name.removeprefix(MODEL)}" in forms
    return name.startswith(("optimizer/", OWED)) and bool(forms[name][1])


def copy_of(portion: MeshPortion, state: MemberState, residuals: Mapping[str, torch.Tensor], into: Segment) -> Copy:
    """A copy of the present state, made while the next step is computed."""
    tensors = {name: values for name, (_, values) in state.tensors().items() if name in portion.boxes}
    tensors |= {name: values for name, values in residuals.items() if name in portion.boxes}
    names = list(portion.starts)

    def copy(number: int, into: Segment, at_bytes: int) -> None:
        values = tensors[names[number]]
        into.tensor(values.dtype, at_bytes, values.numel()).copy_(values.reshape(-1))

    outside = {name: values.clone() for name, values in tensors.items() if name not in portion.starts}
    return Copy(copy, {number: portion.starts[name] for number, name in enumerate(names)}, into, outside)


# --- whole weights ---------------------------------------------------------------------------------------------------


class WholeWeights:
    """Collective: every member calls these methods at the same time; rank 0 gets the others' boxes and writes."""

    def __init__(self, member: MeshMember) -> None:
        self._member = member
        self._known: tuple[int, str] = (-1, "")

    def save(self, path: Path) -> None:
        state = self._member.state
        outlines = {
            name: self._member.forms[f"{MODEL}{first}"] for name, first in self._member.names(persistent=True).items()
        }
        if self._member.groups.world.rank == 0:
            digest = write_weights(path, outlines, self._stream(), ROOM_WAIT_S)
        else:
            digest = ""
            for _ in self._stream():
                pass
        self._known = (state.applied, digest)

    def sha256(self) -> str:
        state = self._member.state
        if self._known[0] != state.applied:
            stream = self._stream()
            digest = weights_sha256_of(stream) if self._member.groups.world.rank == 0 else "" * sum(1 for _ in stream)
            self._known = (state.applied, digest)
        return self._known[1]

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields tensors in the order of names, a tied tensor under each of its names. On other members than rank 0
        they are empty."""
        member = self._member
        world = member.groups.world
        member.state.restore_buffers()
        mine = member.state.part.tensors()
        for name, first in sorted(member.names(persistent=False).items()):
            key = f"{MODEL}{first}"
            dtype, shape = member.forms[key]
            box = whole(shape)
            into = torch.empty(shape, dtype=dtype) if world.rank == 0 else torch.empty(0)
            held = [Holding(rank, {key: boxes[key]}) for rank, boxes in enumerate(member.held) if key in boxes]
            numbers = [number for number, holding in enumerate(held) if holding.rank == world.rank]
            wanted = [{key: box}] + [{} for _ in range(world.size - 1)]
            transfer_boxes(world, moves(held, wanted), dict.fromkeys(numbers, mine), {key: (box, into)})
            yield name, into
