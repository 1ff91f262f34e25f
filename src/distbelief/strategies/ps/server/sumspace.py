"""Room for the sums of a step: of one slice at a time, so that they stay in the processor's cache until applied."""

from __future__ import annotations

import torch

from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.ps.rules.slicing import SliceShape


class SumSpace:
    """For all slices of a server."""

    def __init__(self, size_bytes: int) -> None:
        """`size_bytes`: of the values of the largest slice."""
        self._room = torch.empty(size_bytes, dtype=torch.uint8)

    def tiles(self, shape: SliceShape, layout: Layout) -> dict[int, torch.Tensor]:
        """Of that slice, until those of another one are wanted."""
        found = {}
        for number in shape.tiles:
            tile = layout.tiles[number]
            at = tile.offset_bytes - shape.first_byte
            found[number] = self._room[at : at + tile.size_bytes].view(tile.dtype)
        return found


def own_tiles(shape: SliceShape, layout: Layout) -> dict[int, torch.Tensor]:
    """Room of its own for a slice whose sums are made long before they are applied."""
    tiles = layout.tiles
    return {t: torch.empty(tiles[t].numel, dtype=tiles[t].dtype) for t in shape.tiles}
