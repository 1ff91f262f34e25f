"""Partial sums that come encoded, and go to everybody as they are: for exact strategies, whose units of work lose the
same to compression whoever computes them.

Nobody sends a sum, so nothing is lost on the way back, and no sum depends on who took part. Every member adds up all of
them, in the tree's order. Buffers, and what is not float32, go as in `TorchExchange`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist

from distbelief.comm.compression.parts import PartsCoding
from distbelief.comm.exchange import Geometry, Source, depth, tree_add
from distbelief.comm.group import Rendezvous, wait_all
from distbelief.comm.segment import Segment
from distbelief.comm.torchgroup import TorchExchange
from distbelief.comm.words import Abort


class CodedParts(TorchExchange):
    """See `Exchange`. Whoever has written a slot leaves in `code` what goes on the wire, and in the slot what others
    decode from that."""

    def __init__(
        self,
        meeting: Rendezvous,
        rank: int,
        geometry: Geometry,
        abort: Abort,
        memory: dict[str, Segment] | None = None,
    ) -> None:
        assert geometry.compression is not None
        super().__init__(meeting, rank, geometry, abort, memory)
        self.coding = PartsCoding(geometry.compression.method, geometry.compression.places)
        self._coded = geometry.compression.tiles
        self._plain = [tile for tile in self.tiles if tile not in self._coded]
        self._codes: dict[int, torch.Tensor] = {}
        self._inbox: dict[int, torch.Tensor] = {}
        self._decoded: dict[int, torch.Tensor] = {}

    def code(self, slot: int) -> torch.Tensor:
        """Where to encode what is in that slot."""
        if slot not in self._codes:
            self._codes[slot] = self.coding.room()
        return self._codes[slot]

    def publish(self, tile: int) -> None:
        if tile not in self._coded:
            super().publish(tile)

    def _spread(self) -> None:
        codes = [self._code_of(number, source) for number, source in enumerate(self._plan.sources)]
        sent = [
            dist.broadcast(code, source.rank, async_op=True)
            for code, source in zip(codes, self._plan.sources, strict=True)
        ]
        wait_all([*self._broadcasts(), *sent])
        scratch = [self._room(-1 - level) for level in range(depth(self._plan.program))]
        for part in self.coding.parts:
            out = self.coding.vector(part, self._sums)
            found = []
            for number, source in enumerate(self._plan.sources):
                if source.rank == self.rank:
                    found.append(self.coding.vector(part, self._slots[source.slot]))
                else:
                    found.append(self._room(number)[: out.numel()])
                    self.coding.read(part, codes[number], found[-1])
            tree_add(self._plan.program, found, out, [one[: out.numel()] for one in scratch])

    def _code_of(self, number: int, source: Source) -> torch.Tensor:
        if source.rank == self.rank:
            return self.code(source.slot)
        if number not in self._inbox:
            self._inbox[number] = self.coding.room()
        return self._inbox[number]

    def _room(self, number: int) -> torch.Tensor:
        """For one parameter at a time."""
        if number not in self._decoded:
            self._decoded[number] = torch.empty(self._longest)
        return self._decoded[number]

    @cached_property
    def _longest(self) -> int:
        return max((part.rest.stop - part.rest.start for part in self.coding.parts), default=0)

    def bill(self, apart: Sequence[Source], together: Sequence[Source]) -> tuple[int, int]:
        """(bytes that all members send of these partial sums, bytes that they would send of those, uncompressed)."""
        others = self.size - 1
        coded = len(apart) * others * self.coding.size_bytes
        return coded + self._through_owners(apart, self._plain), self._through_owners(together, self.tiles)

    def _through_owners(self, sources: Sequence[Source], tiles: Sequence[int]) -> int:
        return sum(
            (sum(source.rank != self._owner[tile] for source in sources) + self.size - 1)
            * self._geometry.tiles[tile].size_bytes
            for tile in tiles
        )
