"""Encoded partial sums, for exact strategies: a unit of work has the same encoding error on every member.

Partial sums are decoded and added in the tree's order, and sums are not encoded, so no sum depends on the members that
take part. Either all members receive all partial sums and add them, or one member per parameter receives the partial
sums and broadcasts the uncompressed sum. Both ways give the same bits; the exchange takes the way with fewer bytes.
Buffers and tiles that are not float32 travel as in `TorchExchange`. (In tiles.py and groupsum.py a member encodes its
whole part once, and the sum is encoded again: fewer bytes, but the bits depend on the members.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist

from distbelief.compression.parts import EncodedParameter, PartsCoding
from distbelief.transport.abort import Abort
from distbelief.transport.exchange import Geometry, Source, depth, tree_add
from distbelief.transport.gloo.exchange import TorchExchange
from distbelief.transport.gloo.group import wait_all
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.shm.segment import Segment


class CodedParts(TorchExchange):
    """See `Exchange`. The writer of a slot puts the encoded bytes into `code(slot)`, and the decoded values into the
    slot."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        geometry: Geometry,
        abort: Abort,
        memory: dict[str, Segment] | None = None,
    ) -> None:
        assert geometry.compression is not None
        super().__init__(rendezvous, rank, geometry, abort, memory)
        self.coding = PartsCoding(geometry.compression.method, geometry.compression.places)
        self._coded = geometry.compression.tiles
        self._plain = [tile for tile in self.tiles if tile not in self._coded]
        self._codes: dict[int, torch.Tensor] = {}
        self._inbox: dict[int, torch.Tensor] = {}
        self._decoded: dict[int, torch.Tensor] = {}

    def code(self, slot: int) -> torch.Tensor:
        """The buffer for the encoded bytes of this slot."""
        if slot not in self._codes:
            self._codes[slot] = self.coding.room()
        return self._codes[slot]

    def publish(self, tile: int) -> None:
        if tile not in self._coded:
            super().publish(tile)

    def _spread(self) -> None:
        sources = self._plan.sources
        codes = [self._code_of(number, source) for number, source in enumerate(sources)]
        if self._to_everybody_bytes(sources) <= self._through_adders_bytes(sources):
            sent = [
                dist.broadcast(code, source.rank, async_op=True) for code, source in zip(codes, sources, strict=True)
            ]
            wait_all([*self._broadcasts(), *sent])
            self._add(self.coding.parts, codes)
            return
        self._send_to_adders(codes)
        self._add(self._runs[self.rank], codes)
        sums = [
            dist.broadcast(self._sums.tensor(torch.uint8, 4 * first, 4 * (end - first)), adder, async_op=True)
            for adder, run in enumerate(self._runs)
            if run
            for first, end in [(run[0].place.part.start, run[-1].place.part.stop)]
        ]
        wait_all([*self._broadcasts(), *sums])

    def _send_to_adders(self, codes: Sequence[torch.Tensor]) -> None:
        works = []
        for number, source in enumerate(self._plan.sources):
            for adder, run in enumerate(self._runs):
                if not run or adder == source.rank:
                    continue
                part, tag = codes[number][_span(run)], self._tag(len(self._plan.sources) + number, 0)
                if source.rank == self.rank:
                    works.append(dist.isend(part, adder, tag=tag))
                elif adder == self.rank:
                    works.append(dist.irecv(part, source.rank, tag=tag))
        wait_all(works)

    def _add(self, parts: Sequence[EncodedParameter], codes: Sequence[torch.Tensor]) -> None:
        scratch = [self._room(-1 - level) for level in range(depth(self._plan.program))]
        for part in parts:
            out = self.coding.vector(part, self._sums)
            found = []
            for number, source in enumerate(self._plan.sources):
                if source.rank == self.rank:
                    found.append(self.coding.vector(part, self._slots[source.slot]))
                else:
                    found.append(self._room(number)[: out.numel()])
                    self.coding.read(part, codes[number], found[-1])
            tree_add(self._plan.program, found, out, [one[: out.numel()] for one in scratch])

    @cached_property
    def _runs(self) -> list[list[EncodedParameter]]:
        """For each member, the neighbouring parameters that it adds up, in nearly equal shares."""
        runs: list[list[EncodedParameter]] = [[] for _ in range(self.size)]
        for part in self.coding.parts:
            middle = (part.rest.start + part.rest.stop) / 2
            runs[int(middle * self.size / self.coding.elements)].append(part)
        return runs

    def _code_of(self, number: int, source: Source) -> torch.Tensor:
        if source.rank == self.rank:
            return self.code(source.slot)
        if number not in self._inbox:
            self._inbox[number] = self.coding.room()
        return self._inbox[number]

    def _room(self, number: int) -> torch.Tensor:
        """Scratch memory for one parameter."""
        if number not in self._decoded:
            self._decoded[number] = torch.empty(self._longest)
        return self._decoded[number]

    @cached_property
    def _longest(self) -> int:
        return max((part.rest.stop - part.rest.start for part in self.coding.parts), default=0)

    def traffic_bytes(self, apart: Sequence[Source], together: Sequence[Source]) -> tuple[int, int]:
        """(bytes that all members send of the encoded partial sums `apart`, bytes of `together` uncompressed)."""
        coded = min(self._to_everybody_bytes(apart), self._through_adders_bytes(apart))
        return coded + self._through_owners(apart, self._plain), self._through_owners(together, self.tiles)

    def _to_everybody_bytes(self, sources: Sequence[Source]) -> int:
        return len(sources) * (self.size - 1) * self.coding.size_bytes

    def _through_adders_bytes(self, sources: Sequence[Source]) -> int:
        found = (self.size - 1) * 4 * self.coding.elements
        for adder, run in enumerate(self._runs):
            if run:
                givers = sum(source.rank != adder for source in sources)
                found += givers * (run[-1].code.stop - run[0].code.start)
        return found

    def _through_owners(self, sources: Sequence[Source], tiles: Sequence[int]) -> int:
        return sum(
            (sum(source.rank != self._owner[tile] for source in sources) + self.size - 1)
            * self._geometry.tiles[tile].size_bytes
            for tile in tiles
        )


def _span(run: Sequence[EncodedParameter]) -> slice:
    """The bytes of neighbouring parameters in the encoded block."""
    return slice(run[0].code.start, run[-1].code.stop)
