"""Tiles that are encoded one by one (bf16, int8, top-k): each member sends to the tile's owner, and the owner
broadcasts the sum.

The owner decodes the parts of the other members, adds them to its own part, and encodes the sum once. All members
decode the same bytes, the owner too. The encoding member keeps the encoding's error as a residual. The arithmetic is
that of groupsum.py; here each tile is sent as soon as it is complete, while the next one is computed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from distbelief.compression import block
from distbelief.compression.codec import Codec
from distbelief.compression.exchanges.base import CompressedExchange
from distbelief.compression.exchanges.groupsum import SumCoding
from distbelief.transport.abort import Abort
from distbelief.transport.device.accelerator import Accelerator
from distbelief.transport.exchange import Geometry
from distbelief.transport.gloo.group import wait_all
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.shm.segment import Segment


class CodedTiles(CompressedExchange):
    """See `Exchange`."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        geometry: Geometry,
        abort: Abort,
        codec: Codec,
        memory: dict[str, Segment] | None = None,
        on: Accelerator | None = None,
    ) -> None:
        super().__init__(rendezvous, rank, geometry, abort, memory, on=on)
        self._coding = SumCoding(codec)
        self._sizes = {tile: block.size_bytes(codec, geometry.tiles[tile].numel) for tile in self._packed}
        self._starts: dict[int, int] = {}
        end = 0
        for tile in self._packed:
            self._starts[tile] = end
            end += block.padded(self._sizes[tile])
        self._encoded_sums = torch.zeros(end, dtype=torch.uint8)
        self._outbox: dict[int, torch.Tensor] = {}
        self._inbox: dict[tuple[int, int], torch.Tensor] = {}
        self._arrivals: dict[tuple[int, int], dist.Work | None] = {}
        self._scratch: dict[int, torch.Tensor] = {}

    def _begin_packed(self) -> None:
        self._coding.codec_s = 0.0
        others = sorted(self._senders - {self.rank})
        with self.network():
            for tile in self._packed:
                for rank in others if self._owner[tile] == self.rank else []:
                    if (rank, tile) not in self._inbox:
                        self._inbox[rank, tile] = torch.zeros(self._sizes[tile], dtype=torch.uint8)
                    incoming = dist.irecv(self._inbox[rank, tile], rank, tag=self._tag(rank, tile))
                    self._arrivals[rank, tile] = incoming

    def _publish_packed(self, tile: int) -> None:
        owner = self._owner[tile]
        if owner == self.rank:
            return
        if not self._sources:
            self.residuals.keep(self._span(tile))
            return
        if tile not in self._outbox:
            self._outbox[tile] = torch.zeros(self._sizes[tile], dtype=torch.uint8)
        self._encode(tile, self._vector(tile), self._outbox[tile])
        self._send(tile)

    def _send(self, tile: int) -> None:
        with self.network():
            self._sends.append(dist.isend(self._outbox[tile], self._owner[tile], tag=self._tag(self.rank, tile)))

    def _vector(self, tile: int) -> torch.Tensor:
        """This member's part of the tile's sum."""
        parts = [self._views[source.slot][tile] for source in self._sources]
        if len(parts) == 1:
            return parts[0]
        total = self._room(tile).zero_()
        for part in parts:
            total.add_(part)
        return total

    def _room(self, tile: int) -> torch.Tensor:
        numel = self._geometry.tiles[tile].numel
        if numel not in self._scratch:
            self._scratch[numel] = torch.empty(numel)
        return self._scratch[numel]

    def _encode(self, tile: int, vector: torch.Tensor, into: torch.Tensor) -> None:
        rest, before = self.residuals.after[self._span(tile)], self.residuals.before[self._span(tile)]
        self._coding.encode(rest, vector, into, before)

    def _spread(self) -> None:
        if not self.packing:
            super()._spread()
            return
        self._encode_sums()
        started = time.perf_counter()
        sums = [
            dist.broadcast(self._encoded_sums[first:end], owner, async_op=True)
            for owner, first, end in self._coded_stretches()
        ]
        wait_all([*self._broadcasts(), *sums])
        self._wire_s = time.perf_counter() - started

    def _encode_sums(self) -> None:
        """Add up and encode the sums that this member owns."""
        for tile in self._packed:
            if self._owner[tile] == self.rank:
                self._add_up(tile)
                self._encode(tile, self._out[tile], self._sum_block(tile))

    def _add_up(self, tile: int) -> None:
        out = self._out[tile]
        if self._sources:
            out.copy_(self._vector(tile))
        else:
            out.zero_()
        self._coding.add(out, self._received_parts(tile), self._room(tile))

    def _received_parts(self, tile: int) -> Iterator[torch.Tensor]:
        """The encoded parts of the other members, by rank. Waits for each part only before it is used."""
        for rank in sorted(self._senders - {self.rank}):
            wait_all([self._arrivals[rank, tile]])
            yield self._inbox[rank, tile]

    def _collect_packed(self) -> None:
        for tile in self._packed:
            self._coding.decode(self._sum_block(tile), self._out[tile])
        self._codec_s = self._coding.codec_s

    def _sum_block(self, tile: int) -> torch.Tensor:
        return self._encoded_sums[self._starts[tile] : self._starts[tile] + self._sizes[tile]]

    def _coded_stretches(self) -> list[tuple[int, int, int]]:
        """(owner, first byte, end byte) of each owner's encoded sums, which lie side by side."""
        return [
            (owner, self._starts[mine[0]], self._starts[mine[-1]] + self._sizes[mine[-1]])
            for owner in range(self.size)
            if (mine := [tile for tile in self._packed if self._owner[tile] == owner])
        ]

    def _packed_bytes(self, senders: frozenset[int]) -> int:
        to_owners = sum(len(senders - {self._owner[tile]}) * size for tile, size in self._sizes.items())
        return to_owners + (self.size - 1) * sum(end - first for _, first, end in self._coded_stretches())

    def _timed_bytes(self) -> int:
        stretches = [*self._stretches(), *(self._coded_stretches() if self.packing else [])]
        out = sum((self.size - 1) * (end - first) for owner, first, end in stretches if owner == self.rank)
        return max(out, sum(end - first for owner, first, end in stretches if owner != self.rank))

    def _probe(self) -> float:
        encode_s = decode_s = 0.0
        for tile in self._packed:
            content = torch.empty(self._sizes[tile], dtype=torch.uint8)
            started = time.perf_counter()
            block.write(self._coding.codec, self._room(tile).zero_(), self._out[tile], content)
            between = time.perf_counter()
            block.read(self._coding.codec, content, self._room(tile))
            encode_s += between - started
            decode_s += time.perf_counter() - between
        return self._of_a_step(encode_s, decode_s)

    def _of_a_step(self, encode_s: float, decode_s: float) -> float:
        """Codec seconds of one step, from the seconds for encoding and decoding all tiles once."""
        # the sums, and the other members' parts of the tiles that this member owns
        return encode_s + decode_s * (2 - 1 / self.size)
