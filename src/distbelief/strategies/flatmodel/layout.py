"""The flat layout of a model: the place of every parameter and float buffer in one block of bytes, and its tiles.

The layout depends on the model alone. Every entry starts at a multiple of 64 elements, so that vector kernels divide a
stretch of it in the same way on every member (docs/decisions/0002). Frozen parameters are not in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from distbelief.errors import JobError
from distbelief.transport.exchange import Tile

ALIGN = 64  # elements
TILE_ELEMENTS = 1 << 18  # 1 MiB of fp32: a few tiles fit a core's cache, and the optimizer's overhead per tile is small
TILE_GROUP = 8  # large models have a multiple of this number of tiles: equal shares for 2, 4 or 8 workers
SMALL_TILE = 1 << 12  # small models are divided among workers too, but into tiles of at least this size


@dataclass(frozen=True)
class Entry:
    name: str
    kind: Literal["parameter", "buffer"]
    dtype: torch.dtype
    shape: torch.Size
    offset_bytes: int

    @property
    def numel(self) -> int:
        return self.shape.numel()


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that lies in one tile."""

    entry: int
    first: int
    """The offset in the parameter, in elements."""
    numel: int
    tile_first: int
    """The offset in the tile, in elements."""


@dataclass(frozen=True)
class Layout:
    entries: tuple[Entry, ...]
    tiles: tuple[Tile, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    """The pieces of each tile."""
    size_bytes: int
    parameter_tiles: int
    """The number of tiles with parameters, which come before the tiles with float buffers."""

    def entries_of(self, kind: str) -> list[int]:
        return [i for i, entry in enumerate(self.entries) if entry.kind == kind]


def trainable(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Trainable parameters in registration order; a tied parameter once, under its first name."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def float_buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, b) for name, b in model.named_buffers() if b.is_floating_point()]


def lay_out(model: torch.nn.Module, *, whole_parameters: bool = False, whole: Collection[int] = ()) -> Layout:
    """Lay a model out. `whole_parameters`: keep every parameter inside one tile, for optimizers that need whole
    parameters. `whole`: the numbers of parameters to keep inside one tile, for functions that need them whole."""
    entries: list[Entry] = []
    tiles: list[Tile] = []
    pieces: list[tuple[Piece, ...]] = []
    offset_bytes = 0
    parameter_tiles = 0
    for kind, tensors in (("parameter", trainable(model)), ("buffer", float_buffers(model))):
        _check(tensors)
        known = len(entries)  # entries keep the model's order, whatever their places
        entries += [Entry(name, kind, t.dtype, t.shape, -1) for name, t in tensors]  # type: ignore[arg-type]
        for dtype in dict.fromkeys(t.dtype for _, t in tensors):  # in order of first appearance
            region = [i for i in range(known, len(entries)) if entries[i].dtype == dtype]
            first_bytes, elements = offset_bytes, 0
            for index in region:
                entries[index] = replace(entries[index], offset_bytes=first_bytes + elements * dtype.itemsize)
                elements += _round_up(entries[index].numel, ALIGN)
            cuts = _cuts(entries, region, first_bytes, elements, whole_parameters)
            if not whole_parameters:
                uncut = [entries[index] for index in region if index in whole]
                cuts = _around([((e.offset_bytes - first_bytes) // dtype.itemsize, e.numel) for e in uncut], cuts)
            for first, last in cuts:
                tiles.append(Tile(len(tiles), dtype, first_bytes + first * dtype.itemsize, last - first))
                pieces.append(_pieces(entries, region, tiles[-1]))
            offset_bytes = _round_up(first_bytes + elements * dtype.itemsize, 4096)
        if kind == "parameter":
            parameter_tiles = len(tiles)
    return Layout(tuple(entries), tuple(tiles), tuple(pieces), offset_bytes, parameter_tiles)


def _check(tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in tensors:
        if tensor.is_complex():
            raise JobError(f"'{name}' is complex: keep it as a real tensor with a last axis of 2 (torch.view_as_real)")
        if tensor.layout != torch.strided:
            raise JobError(f"'{name}' is a {tensor.layout} tensor; parameters and buffers must be dense")


def _cuts(
    entries: Sequence[Entry], region: Sequence[int], first_bytes: int, elements: int, whole: bool
) -> list[tuple[int, int]]:
    """Cut a region of that many elements into tiles of about equal size."""
    if not elements:  # a region of empty tensors
        return []
    count = -(-elements // TILE_ELEMENTS)
    count = _round_up(count, TILE_GROUP) if count >= TILE_GROUP else min(TILE_GROUP, -(-elements // SMALL_TILE))
    target = _round_up(-(-elements // max(count, 1)), ALIGN)
    if not whole:
        return [(first, min(first + target, elements)) for first in range(0, elements, target)]
    cuts, first = [], 0
    for index in region:
        entry = entries[index]
        end = (entry.offset_bytes - first_bytes) // entry.dtype.itemsize + _round_up(entry.numel, ALIGN)
        if end - first >= target or index == region[-1]:
            cuts.append((first, end))
            first = end
    return [cut for cut in cuts if cut[0] < cut[1]]


def _around(uncut: Sequence[tuple[int, int]], cuts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Move cuts inside of these stretches, given as (first element, number of elements), to the stretch's end."""
    edges = [first for first, _ in cuts]
    for start, numel in uncut:
        end = start + _round_up(numel, ALIGN)
        edges = [end if start < edge < end else edge for edge in edges]
    found = sorted({*edges, *(last for _, last in cuts[-1:])})
    return list(itertools.pairwise(found))


def _pieces(entries: Sequence[Entry], region: Sequence[int], tile: Tile) -> tuple[Piece, ...]:
    found = []
    for index in region:
        entry = entries[index]
        start = (entry.offset_bytes - tile.offset_bytes) // entry.dtype.itemsize  # may be before the tile
        low, high = max(start, 0), min(start + entry.numel, tile.numel)
        if low < high:
            found.append(Piece(index, low - start, high - low, low))
    return tuple(found)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
