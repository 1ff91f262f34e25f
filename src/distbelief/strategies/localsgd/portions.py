"""What replicas keep under names, beside the tensors of the model and of the outer step (named.py):

    replicaR/optimizer/KEY/NAME   what replica R's optimizer keeps for a parameter
    replicaR/begun/NAME           whether it keeps anything for it yet
    replicaR/residual/NAME        what it still owes of a parameter's differences, where they are compressed

Members are nowhere in the names, so any number of them can load it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from distbelief.checkpoint.fit import form, forms
from distbelief.checkpoint.manifest import PartEntry
from distbelief.checkpoint.parts import Slice, dtype_name
from distbelief.checkpoint.sources import MODEL
from distbelief.compression.parts import Part, PartsCoding
from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.flatmodel.namedtensors import (
    TilePlace,
    TilePortion,
    put_optimizer_back,
    require_fit,
    tile_places,
)
from distbelief.strategies.flatmodel.tileoptimizer import Recipe, state_bytes
from distbelief.strategies.localsgd.kept import kept_bytes, owed, owed_at
from distbelief.transport.shm.segment import Segment


def prefix(replica: int) -> str:
    return f"replica{replica}/"


def is_inner(name: str) -> bool:
    """Whether a saved tensor is what a replica keeps."""
    first, _, _ = name.partition("/")
    return first.removeprefix("replica").isdigit() and first.startswith("replica")


def inner_places(layout: Layout, recipe: Recipe, replica: int, coding: PartsCoding | None) -> Iterator[TilePlace]:
    """Where each named tensor lies in the bytes that a replica keeps."""
    start = 0
    for tile in range(layout.parameter_tiles):
        for place in tile_places(layout, recipe, tile):
            if not place.tensor.startswith(MODEL):
                at_bytes = start + place.at_bytes - layout.tiles[tile].size_bytes
                yield replace(place, tensor=prefix(replica) + place.tensor, at_bytes=at_bytes)
        start += state_bytes(recipe, layout, tile)
    for part in coding.parts if coding else ():
        name, at_bytes = _owed_name(layout, replica, part), owed_at(layout, recipe) + 4 * part.rest.start
        count = part.rest.stop - part.rest.start
        yield TilePlace(name, torch.float32, part.place.shape, 0, count, at_bytes)


def _owed_name(layout: Layout, replica: int, part: Part) -> str:
    return f"{prefix(replica)}residual/{layout.entries[part.place.mark].name}"


class LocalPortion:
    """See `Portion`: some tiles, and what some replicas keep behind them."""

    def __init__(
        self, tiles: TilePortion, layout: Layout, recipe: Recipe, replicas: Iterable[int],
        coding: PartsCoding | None = None,
    ) -> None:  # fmt: skip
        self.tiles = tiles
        self._layout = layout
        self._recipe = recipe
        self._coding = coding
        self.starts: dict[int, int] = {}
        """Replica -> the byte at which its state starts."""
        at = tiles.size_bytes
        for replica in replicas:
            self.starts[replica] = at
            at += kept_bytes(layout, recipe, coding)
        self.size_bytes = at

    def entries(self) -> list[PartEntry]:
        found = [PartEntry(p.tensor, dtype_name(p.dtype), p.shape, p.first, p.count) for _, p in self._all()]
        return [*self.tiles.entries(), *found]

    def slices(self, copy: Segment, outside: Mapping[str, torch.Tensor]) -> list[Slice]:
        found = [Slice(p.tensor, copy.tensor(p.dtype, at, p.count), p.shape, p.first) for at, p in self._all()]
        return [*self.tiles.slices(copy, outside), *found]

    def _all(self) -> Iterator[tuple[int, TilePlace]]:
        for replica, start in self.starts.items():
            for place in inner_places(self._layout, self._recipe, replica, self._coding):
                yield start + place.at_bytes, place


def inner_states(
    tensors: Mapping[str, torch.Tensor], layout: Layout, recipe: Recipe, replicas: int,
    coding: PartsCoding | None = None,
) -> Sequence[torch.Tensor]:  # fmt: skip
    """The bytes that every replica keeps, from saved tensors. Every name and shape is checked."""
    places = [place for replica in range(replicas) for place in inner_places(layout, recipe, replica, coding)]
    require_fit(forms(tensors), {place.tensor: form(dtype_name(place.dtype), place.shape) for place in places})
    found = []
    for replica in range(replicas):
        start = prefix(replica)
        mine = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
        sizes = [state_bytes(recipe, layout, tile) for tile in range(layout.parameter_tiles)]
        state = torch.zeros(kept_bytes(layout, recipe, coding), dtype=torch.uint8)
        at = 0
        for tile, size_bytes in enumerate(sizes):
            put_optimizer_back(mine, state[at : at + size_bytes], layout, recipe, tile)
            at += size_bytes
        if coding:
            for part in coding.parts:
                owed(state, coding)[part.rest] = tensors[_owed_name(layout, replica, part)].reshape(-1)
        found.append(state)
    return found
