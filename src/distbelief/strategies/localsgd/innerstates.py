"""The inner state of every replica, kept from one round to the next: its optimizer's state and, with compression, its
residual. A worker's death must lose neither.

    | begun | stamps, two per replica | the bytes of each replica, twice |          the memory of `InnerStates`
    | optimizer state, tile after tile | residual |                                the bytes of one replica

The inner state of a replica before round T lies in place T mod 2 with the stamp T + 1; the member that trains the
replica in that round writes the next state to the other place. So an aborted round can begin again. The members of one
host share one such memory, which outlives them. Members without shared memory have one each: before a round is
committed, each sends its replicas' states to the next member (unless that costs too much). A replica is then lost only
if two neighbours die at the same moment.

A checkpoint holds these states under names (`LocalPortion`), beside the tensors of the model and of the outer step
(namedtensors.py). Members are not in the names, so any number of members can load it:

    replicaR/optimizer/KEY/NAME   the state of replica R's optimizer for a parameter
    replicaR/begun/NAME           whether the optimizer has state for the parameter yet
    replicaR/residual/NAME        replica R's residual of the parameter's differences
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from distbelief.checkpoint.manifest import PartEntry
from distbelief.checkpoint.parts import Slice, dtype_name
from distbelief.checkpoint.sources import MODEL
from distbelief.checkpoint.tensorforms import form, forms
from distbelief.compression.parts import EncodedParameter, PartsCoding
from distbelief.shards import Range
from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.flatmodel.namedtensors import (
    TilePlace,
    TilePortion,
    put_optimizer_back,
    require_fit,
    tile_places,
)
from distbelief.strategies.flatmodel.tileoptimizer import Recipe, state_bytes
from distbelief.transport.exchange import Exchange
from distbelief.transport.shm.segment import Segment

_PAGE = 4096
_BEGUN = struct.Struct("q")  # the round that a member has begun, plus 1


_LINE = 64


def kept_bytes(layout: Layout, recipe: Recipe, coding: PartsCoding | None) -> int:
    return owed_at(layout, recipe) + 4 * coding.elements if coding else optimizer_bytes(layout, recipe)


def optimizer_bytes(layout: Layout, recipe: Recipe) -> int:
    return sum(state_bytes(recipe, layout, tile) for tile in range(layout.parameter_tiles))


def owed_at(layout: Layout, recipe: Recipe) -> int:
    """The residual's first byte."""
    return -(-optimizer_bytes(layout, recipe) // _LINE) * _LINE


def owed(kept: torch.Tensor, coding: PartsCoding) -> torch.Tensor:
    """The residual, at the end of the inner state's bytes."""
    return kept[len(kept) - 4 * coding.elements :].view(torch.float32)


class InnerStates:
    """Views of the inner states' memory. `ranges`: each member's replicas; `copies`: send states to the next member."""

    def __init__(self, exchange: Exchange, ranges: Sequence[Range], size_bytes: int, copies: bool = True) -> None:
        self.copies = copies and not exchange.shares_state and exchange.size > 1
        self.exchange = exchange
        self._ranges = ranges
        self._replicas = ranges[-1][1]
        self.size_bytes = size_bytes
        head = -(-8 * (1 + 2 * self._replicas) // _PAGE) * _PAGE
        self._stretch = -(-size_bytes // 64) * 64
        segment = exchange.state(head + 2 * self._replicas * self._stretch, "inner")
        stamps = np.frombuffer(segment.buffer, np.int64, 1 + 2 * self._replicas)
        self._begun, self._stamps = stamps[:1], stamps[1:].reshape(self._replicas, 2)
        self._places = [
            [segment.tensor(torch.uint8, head + (2 * r + place) * self._stretch, size_bytes) for place in range(2)]
            for r in range(self._replicas)
        ]

    def read(self, replica: int, number: int) -> torch.Tensor:
        """The inner state of a replica before round `number`."""
        assert self._has(replica, number), f"the state of replica {replica} before round {number} is not here"
        return self._places[replica][number % 2]

    def write(self, replica: int, number: int, state: torch.Tensor) -> None:
        self._stamps[replica, number % 2] = 0
        self._places[replica][number % 2].copy_(state)
        self._stamps[replica, number % 2] = number + 1

    def begin(self, number: int) -> None:
        """Record that this member begins round `number`."""
        self._begun[0] = number + 1

    def set(self, number: int, states: Sequence[torch.Tensor]) -> None:
        """Set the inner states of all replicas before round `number`, at the start of a run."""
        self._stamps[:] = 0
        for replica, state in enumerate(states):
            self.write(replica, number, state)

    def _has(self, replica: int, number: int) -> bool:
        """Before the first round, unwritten memory is the state of an optimizer without state."""
        stamp = int(self._stamps[replica, number % 2])
        return stamp == number + 1 or (number == 0 and stamp == 0)

    # --- members that have a memory each -----------------------------------------------------------------------------

    def agree(self, number: int) -> tuple[bool, list[int]]:
        """At a generation's start, before round `number`: send each member the states that it needs. Returns whether a
        member had begun the round, and the replicas whose state no member has; if there are any, nothing was sent."""
        mine = bytes(self._has(replica, number) for replica in range(self._replicas))
        everybody = self.exchange.gather(_BEGUN.pack(int(self._begun[0])) + mine)
        begun = any(_BEGUN.unpack_from(theirs)[0] == number + 1 for theirs in everybody)
        holders = [
            [rank for rank, theirs in enumerate(everybody) if theirs[_BEGUN.size + replica]]
            for replica in range(self._replicas)
        ]
        lost = [replica for replica, ranks in enumerate(holders) if not ranks]
        if not lost:
            for replica, ranks in enumerate(holders):
                owner = self._owner(replica)
                wanting = [owner, self._next(owner)] if self.copies else [owner]
                self._send(replica, number, ranks[0], [rank for rank in wanting if rank not in ranks])
        return begun, lost

    def send_on(self, number: int) -> None:
        """Send the states of this member's replicas before round `number` to the next member. Members of even rank send
        first, so that the members do not wait for each other in a chain."""
        if not self.copies:
            return
        for turn in range(2):
            for replica in range(self._replicas):
                owner = self._owner(replica)
                if owner % 2 == turn:
                    self._send(replica, number, owner, [self._next(owner)])

    def _send(self, replica: int, number: int, source: int, receivers: Sequence[int]) -> None:
        if not receivers:
            return
        mine = self.exchange.rank in receivers
        if mine:
            self._stamps[replica, number % 2] = 0
        self.exchange.transfer(self._places[replica][number % 2], source, receivers)
        if mine:
            self._stamps[replica, number % 2] = number + 1

    def _owner(self, replica: int) -> int:
        return next(rank for rank, (first, end) in enumerate(self._ranges) if first <= replica < end)

    def _next(self, rank: int) -> int:
        return (rank + 1) % self.exchange.size


def prefix(replica: int) -> str:
    return f"replica{replica}/"


def is_inner(name: str) -> bool:
    """Whether a saved tensor belongs to an inner state."""
    first, _, _ = name.partition("/")
    return first.removeprefix("replica").isdigit() and first.startswith("replica")


def inner_places(layout: Layout, recipe: Recipe, replica: int, coding: PartsCoding | None) -> Iterator[TilePlace]:
    """The place of each named tensor in the bytes of an inner state."""
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


def _owed_name(layout: Layout, replica: int, part: EncodedParameter) -> str:
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
        """Replica -> the first byte of its inner state."""
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
