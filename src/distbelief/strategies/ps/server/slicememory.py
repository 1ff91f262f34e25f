"""The memory of one slice on one server, and the bytes that workers push to it.

`SliceMemory` has the values, which workers on the same host map and read, and the optimizer's state. The functions
below it read a slice's stretch of a gradient tile by tile: from a payload, or from the worker's own shared memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from distbelief.errors import DistBeliefError
from distbelief.job import Job
from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.flatmodel.tileoptimizer import Recipe, TileMemory, TileUpdates, set_buffers
from distbelief.strategies.ps.protocol.messages import Gradient, PartialSum, values_at
from distbelief.strategies.ps.rules.slicing import SliceShape
from distbelief.strategies.ps.server.stores import Change
from distbelief.transport.shm.segment import Segment


class SliceMemory:
    def __init__(self, shape: SliceShape, layout: Layout, recipe: Recipe, job: Job, values: Segment) -> None:
        """`values` has two version numbers (that of the update in progress, and that of the last complete one), then
        the slice's stretch of the layout."""
        self.shape = shape
        self.layout = layout
        self._segment = values
        self._at = values_at(shape.first_byte)
        self._versions = np.frombuffer(values.buffer, np.int64, 2)
        self._state = torch.zeros(sum(shape.state_bytes), dtype=torch.uint8)
        self.values = {
            t: values.tensor(tile.dtype, self._at + tile.offset_bytes - shape.first_byte, tile.numel)
            for t in shape.tiles
            for tile in [layout.tiles[t]]
        }
        self._optimizer: dict[int, torch.Tensor] = {}
        at = 0
        for tile, size_bytes in zip(shape.tiles, shape.state_bytes, strict=True):
            self._optimizer[tile] = self._state[at : at + size_bytes]
            at += size_bytes
        self._job = job
        self._recipe = recipe
        self._updates = self._made()

    def _made(self) -> TileUpdates:
        """An optimizer that goes on from the state in the memory."""
        tiles = [TileMemory(t, self.values[t], self._optimizer[t]) for t in self.parameter_tiles]
        return TileUpdates(self._job.seed, self._recipe, self.layout, tiles)

    def _rate(self, step: int) -> float:
        return self._job.rate_factor(step)

    @property
    def parameter_tiles(self) -> list[int]:
        return [t for t in self.shape.tiles if t < self.layout.parameter_tiles]

    @property
    def buffer_tiles(self) -> list[int]:
        return [t for t in self.shape.tiles if t >= self.layout.parameter_tiles]

    def update(self, step: int, sums: dict[int, torch.Tensor], units: int, untouched: np.ndarray) -> None:
        """Apply a step. `sums`: gradients as the optimizer wants them, and sums of the buffers over `units` shards."""
        self._versions[0] = step + 1
        self._updates.apply(step, {t: sums[t] for t in self.parameter_tiles}, self._rate(step), untouched)
        for tile in self.buffer_tiles:
            set_buffers(self.values[tile], sums[tile].div_(units), self.layout.pieces[tile], untouched)
        self._versions[1] = step + 1

    def update_freely(self, step: int, version: int, parts: dict[int, torch.Tensor], untouched: np.ndarray) -> None:
        """Apply an asynchronous update: gradients, and the differences of the buffers."""
        self._versions[0] = version + 1
        self._updates.apply(step, {t: parts[t] for t in self.parameter_tiles}, self._rate(step), untouched)
        for tile in self.buffer_tiles:
            self.values[tile].add_(parts[tile])
        self._versions[1] = version + 1

    def value_view(self) -> memoryview:
        return self._segment.view(self._at, self.shape.value_bytes)

    def contents(self) -> torch.Tensor:
        """A copy: values, then optimizer state, tile by tile."""
        copy = torch.empty(self.shape.size_bytes, dtype=torch.uint8)
        at = copy.data_ptr()
        for part in self._stretches():
            ctypes.memmove(at, part.data_ptr(), part.numel())
            at += part.numel()
        return copy

    def load(self, contents: torch.Tensor, version: int) -> None:
        at = 0
        for part in self._stretches():
            part.copy_(contents[at : at + part.numel()])
            at += part.numel()
        self._versions[:] = version
        self._updates = self._made()

    def _stretches(self) -> list[torch.Tensor]:
        found = []
        for tile in self.shape.tiles:
            found += [self.values[tile].view(torch.uint8), self._optimizer[tile]]
        return [part for part in found if part.numel()]


OpenSegment = Callable[[str], Segment]


def with_bytes(shape: SliceShape, change: Change, open_segment: OpenSegment) -> Change:
    """The change with a copy of the bytes, if they lie in a worker's memory."""
    content = change.content
    if not isinstance(content, PartialSum | Gradient) or not content.segment:
        return change
    payload = bytearray(open_segment(content.segment).view(shape.first_byte, shape.value_bytes))
    if isinstance(content, Gradient) and content.dated:
        payload += open_segment(content.values).view(shape.first_byte, shape.value_bytes)
        content = msgspec.structs.replace(content, values="")
    return Change(msgspec.structs.replace(content, segment=""), payload)


def gradient_and_values(
    shape: SliceShape, layout: Layout, update: Gradient, payload: Any, open_segment: OpenSegment
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients of an asynchronous update, and the values that they were computed with, if they came along."""
    behind = None
    if update.dated and not update.segment:
        payload, behind = memoryview(payload)[: shape.value_bytes], memoryview(payload)[shape.value_bytes :]
    gradient = tiles_of(shape, layout, update.segment, payload, open_segment)
    return gradient, tiles_of(shape, layout, update.values, behind, open_segment) if update.dated else []


def tiles_of(
    shape: SliceShape, layout: Layout, segment: str, payload: Any, open_segment: OpenSegment
) -> list[torch.Tensor]:
    """The slice's tiles of a payload, or of a segment: views, without a copy."""
    tiles = [layout.tiles[t] for t in shape.tiles]
    if segment:
        memory = open_segment(segment)
        return [memory.tensor(tile.dtype, tile.offset_bytes, tile.numel) for tile in tiles]
    raw = memoryview(payload)
    if raw.nbytes != shape.value_bytes:
        raise DistBeliefError(f"slice {shape.number} has {shape.value_bytes} bytes, not {raw.nbytes}")
    return [
        torch.frombuffer(raw, dtype=tile.dtype, count=tile.numel, offset=tile.offset_bytes - shape.first_byte)
        for tile in tiles
    ]
