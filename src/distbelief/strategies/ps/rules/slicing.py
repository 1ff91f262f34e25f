"""Cuts the parameters into slices, the units that servers own and replicate. A function of the model alone."""

from __future__ import annotations

from dataclasses import dataclass

from distbelief.shards import Range
from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.flatmodel.tileoptimizer import Recipe, state_bytes

FEWEST_SLICES, MOST_SLICES = 4, 16
"""Enough to balance a few servers, and few enough that messages about them cost little beside a step."""
SLICE_BYTES = 8 << 20
"""The size of a slice's values and optimizer state. The messages about a slice in a step cost as much as adding up a
quarter of it, so smaller models have fewer slices."""


@dataclass(frozen=True)
class SliceShape:
    """Neighbouring tiles. Their values are one stretch of the layout, with a gap where another dtype begins."""

    number: int
    tiles: range
    first_byte: int
    end_byte: int
    state_bytes: tuple[int, ...]
    """Bytes of the optimizer's state, by tile."""
    size_bytes: int
    """Bytes of the tiles and their state, without the gaps."""

    @property
    def value_bytes(self) -> int:
        """Bytes of the stretch."""
        return self.end_byte - self.first_byte


def cut(layout: Layout, recipe: Recipe) -> list[SliceShape]:
    """Slices of nearly equal size, in the order of the layout."""
    sizes = [
        state_bytes(recipe, layout, tile.index) if tile.index < layout.parameter_tiles else 0 for tile in layout.tiles
    ]
    weights = [tile.size_bytes + size for tile, size in zip(layout.tiles, sizes, strict=True)]
    slices: list[SliceShape] = []
    first, passed, whole = 0, 0, sum(weights)
    most = min(max(whole // SLICE_BYTES, FEWEST_SLICES), MOST_SLICES)
    for tile, weight in enumerate(weights):
        passed += weight
        if passed * most >= whole * (len(slices) + 1) or tile + 1 == len(weights):
            at, last = layout.tiles[first], layout.tiles[tile]
            end_byte = last.offset_bytes + last.size_bytes
            mine = range(first, tile + 1)
            states, size_bytes = tuple(sizes[first : tile + 1]), sum(weights[first : tile + 1])
            slices.append(SliceShape(len(slices), mine, at.offset_bytes, end_byte, states, size_bytes))
            first = tile + 1
    return slices


def parameter_stretch(layout: Layout, shape: SliceShape) -> tuple[int, Range]:
    """(number of elements of all parameters, range of the elements of this slice), if all parameters have one dtype.
    The range is (0, 0) for a slice of buffers alone."""
    last = layout.tiles[layout.parameter_tiles - 1]
    size = last.offset_bytes // last.dtype.itemsize + last.numel
    first = shape.first_byte // last.dtype.itemsize
    return size, (first, min(shape.end_byte // last.dtype.itemsize, size)) if first < size else (0, 0)
