"""A slice's stretch of what a worker has computed, tile by tile: from a frame, or in the worker's own memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from distbelief.errors import DistBeliefError
from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.ps.protocol.messages import Gradient, Node
from distbelief.strategies.ps.rules.slicing import SliceShape
from distbelief.strategies.ps.server.stores import Change
from distbelief.transport.shm.segment import Segment

OpenSegment = Callable[[str], Segment]


def with_bytes(shape: SliceShape, change: Change, open_segment: OpenSegment) -> Change:
    """A change whose bytes lie in a worker's memory, with a copy of them instead."""
    content = change.content
    if not isinstance(content, Node | Gradient) or not content.segment:
        return change
    payload = bytearray(open_segment(content.segment).view(shape.first_byte, shape.value_bytes))
    if isinstance(content, Gradient) and content.dated:
        payload += open_segment(content.values).view(shape.first_byte, shape.value_bytes)
        content = msgspec.structs.replace(content, values="")
    return Change(msgspec.structs.replace(content, segment=""), payload)


def gradient_and_values(
    shape: SliceShape, layout: Layout, update: Gradient, payload: Any, open_segment: OpenSegment
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of a worker's update, and the values that it was computed with, if they came along."""
    behind = None
    if update.dated and not update.segment:
        payload, behind = memoryview(payload)[: shape.value_bytes], memoryview(payload)[shape.value_bytes :]
    gradient = tiles_of(shape, layout, update.segment, payload, open_segment)
    return gradient, tiles_of(shape, layout, update.values, behind, open_segment) if update.dated else []


def tiles_of(
    shape: SliceShape, layout: Layout, segment: str, payload: Any, open_segment: OpenSegment
) -> list[torch.Tensor]:
    """Views, without a copy."""
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
