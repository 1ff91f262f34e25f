"""The state of a search in a checkpoint, beside the model (flatmodel/namedtensors.py):

    lbfgs/state          the `State` of rules/lbfgs.py: numbers, and the names of the vectors that they belong to
    lbfgs/VECTOR/NAME    the part of such a vector that belongs to parameter NAME. The present point is the model itself

The names contain neither slices nor members, so any number of servers and workers can go on from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec
import torch

from distbelief.checkpoint.faults import CheckpointMismatch
from distbelief.checkpoint.manifest import PartEntry
from distbelief.checkpoint.parts import Slice, dtype_name
from distbelief.checkpoint.sources import MODEL
from distbelief.strategies.base import Saved
from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.flatmodel.namedtensors import TilePlace
from distbelief.strategies.ps.rules.slicing import SliceShape, parameter_stretch
from distbelief.strategies.sandblaster.rules.lbfgs import State
from distbelief.transport.shm.segment import Segment

STATE = "lbfgs/state"
START = "start"
"""The vector at which a new search begins: the initial parameters."""


def state_bytes(state: State | None) -> bytes:
    return msgspec.msgpack.encode(state) if state else b""


def state_of(content: bytes) -> State | None:
    return msgspec.msgpack.decode(content, type=State) if content else None


def vectors_of(state: State | None) -> list[str]:
    """The vectors that a state names, except its point."""
    if state is None:
        return []
    return [state.gradient, *(name for past in state.past for name in (past.direction, past.change))]


class VectorPortion:
    """A `Portion`: several slices, each with its values and then its stretch of every vector, and tensors outside of
    the slices."""

    def __init__(
        self, layout: Layout, shapes: Sequence[SliceShape], vectors: Sequence[str], outside: Sequence[PartEntry]
    ) -> None:
        self._layout = layout
        self._shapes = shapes
        self._vectors = vectors
        self._outside = outside
        self.starts: dict[int, int] = {}
        """Slice -> the byte at which it starts."""
        at = 0
        for shape in shapes:
            self.starts[shape.number] = at
            at += shape.value_bytes + len(vectors) * self.vector_bytes(shape)
        self.size_bytes = at

    def vector_bytes(self, shape: SliceShape) -> int:
        """The size of the slice's stretch of one vector."""
        _, (first, end) = parameter_stretch(self._layout, shape)
        return (end - first) * self._layout.tiles[0].dtype.itemsize

    def entries(self) -> list[PartEntry]:
        found = [PartEntry(p.tensor, dtype_name(p.dtype), p.shape, p.first, p.count) for p in self._all()]
        return [*found, *self._outside]

    def slices(self, copy: Segment, outside: Mapping[str, torch.Tensor]) -> list[Slice]:
        found = [Slice(p.tensor, copy.tensor(p.dtype, p.at_bytes, p.count), p.shape, p.first) for p in self._all()]
        return [*found, *(Slice.whole(entry.tensor, outside[entry.tensor]) for entry in self._outside)]

    def _all(self) -> Iterator[TilePlace]:
        for shape in self._shapes:
            start = self.starts[shape.number]
            for place in _places(self._layout, shape):
                yield replace(place, tensor=MODEL + place.tensor, at_bytes=start + place.at_bytes)
            for number, vector in enumerate(self._vectors):
                at = start + shape.value_bytes + number * self.vector_bytes(shape)
                for place in _places(self._layout, shape, parameters_only=True):
                    yield replace(place, tensor=f"lbfgs/{vector}/{place.tensor}", at_bytes=at + place.at_bytes)


def _places(layout: Layout, shape: SliceShape, parameters_only: bool = False) -> Iterator[TilePlace]:
    """The places of the model's tensors in the bytes of a slice."""
    for tile in shape.tiles:
        if parameters_only and tile >= layout.parameter_tiles:
            return
        for piece in layout.pieces[tile]:
            entry = layout.entries[piece.entry]
            at = layout.tiles[tile].offset_bytes - shape.first_byte + piece.tile_first * entry.dtype.itemsize
            yield TilePlace(entry.name, entry.dtype, tuple(entry.shape), piece.first, piece.numel, at)


def saved_state(saved: Saved | None) -> State | None:
    """The state of the search in a checkpoint; None: another strategy wrote it, or it has weights alone."""
    if saved is None or STATE not in saved.tensors:
        return None
    return state_of(saved.tensors[STATE].contiguous().numpy().tobytes())


def saved_vectors(
    saved: Saved, state: State, layout: Layout, shape: SliceShape, values: torch.Tensor
) -> dict[str, torch.Tensor]:
    """A slice's stretches of all vectors that the state names. `values`: the slice's bytes of the layout."""
    _, (first, end) = parameter_stretch(layout, shape)
    itemsize = layout.tiles[0].dtype.itemsize
    found = {state.point: values[: (end - first) * itemsize].view(layout.tiles[0].dtype)}
    for vector in vectors_of(state):
        stretch = found[vector] = torch.zeros(end - first, dtype=layout.tiles[0].dtype)
        for place in _places(layout, shape, parameters_only=True):
            name = f"lbfgs/{vector}/{place.tensor}"
            if name not in saved.tensors:
                raise CheckpointMismatch(
                    f"the checkpoint of step {saved.step} lacks '{name}', which its search goes on from",
                    hint="begin another run with its weights: distbelief train JOB --from RUN",
                )
            at = place.at_bytes // itemsize
            part = saved.tensors[name].reshape(-1)[place.first : place.first + place.count]
            stretch[at : at + place.count] = part
    return found
