"""The format of a compressed payload: a slice's stretch of a push, tile by tile, each from a multiple of 64 bytes on.

Float32 gradients are encoded; gradients of other dtypes, and buffers, are copied. Workers write it and servers read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from distbelief.compression import block
from distbelief.compression.codec import Codec
from distbelief.compression.methods import codec_of
from distbelief.errors import DistBeliefError
from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.ps.rules.slicing import SliceShape

_LINE = 64


@dataclass(frozen=True)
class _Place:
    tile: int
    first: int
    size_bytes: int
    coded: bool


class PushCoding:
    """The compression of pushes to one slice."""

    def __init__(self, method: str, shape: SliceShape, layout: Layout) -> None:
        """`method`: see `compression.option`."""
        self.codec: Codec = codec_of(method)
        self.number = shape.number
        self._tiles = {tile: layout.tiles[tile] for tile in shape.tiles}
        self._places = []
        end = 0
        for index, tile in self._tiles.items():
            coded = index < layout.parameter_tiles and tile.dtype == torch.float32
            size = block.size_bytes(self.codec, tile.numel) if coded else tile.size_bytes
            self._places.append(_Place(index, end, size, coded))
            end += -(-size // _LINE) * _LINE
        self.size_bytes = end
        self.plain_bytes = shape.value_bytes

    def write(self, parts: dict[int, torch.Tensor], rests: dict[int, torch.Tensor], into: torch.Tensor) -> None:
        """Encode residual + part of every tile; the rest stays in `rests`."""
        for place in self._places:
            room = into[place.first : place.first + place.size_bytes]
            if place.coded:
                block.write(self.codec, rests[place.tile], parts[place.tile], room)
            else:
                room.copy_(parts[place.tile].view(torch.uint8))

    def read(self, payload: Any, out: dict[int, torch.Tensor]) -> None:
        raw = memoryview(payload)
        if raw.nbytes != self.size_bytes:
            raise DistBeliefError(
                f"a {self.codec} update of slice {self.number} has {self.size_bytes} bytes, not {raw.nbytes}"
            )
        content = torch.frombuffer(raw, dtype=torch.uint8)
        for place in self._places:
            part = content[place.first : place.first + place.size_bytes]
            if place.coded:
                block.read(self.codec, part, out[place.tile])
            else:
                out[place.tile].view(torch.uint8).copy_(part)

    @property
    def coded(self) -> list[int]:
        return [place.tile for place in self._places if place.coded]
