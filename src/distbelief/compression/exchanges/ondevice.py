"""The exchange of members on accelerators with compressed gradients: the device encodes and decodes.

Only encoded bytes cross to the host and the network, and back. Residuals are on the device too. Buffers and
uncompressed steps travel as in `DeviceExchange`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distbelief.compression import block
from distbelief.compression.codec import Codec
from distbelief.compression.exchanges.base import CompressedExchange
from distbelief.compression.exchanges.tiles import CodedTiles
from distbelief.transport.abort import Abort
from distbelief.transport.device.accelerator import Accelerator, Stopwatch
from distbelief.transport.device.exchange import DeviceExchange, Slot, stretches
from distbelief.transport.exchange import Geometry, Source
from distbelief.transport.gloo.group import wait_all
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.shm.segment import Segment

# --- tiles encoded on the device ----------------------------------------------------------------------------------
# The bytes on the wire are those of `CodedTiles`. A device launch costs as much for one tile as for a
# hundred, so neighbouring tiles are encoded together; the host waits for the device only before it sends.


@dataclass(frozen=True)
class Run:
    """Neighbouring tiles of one length and one owner."""

    tiles: range
    owner: int
    elements: slice
    """The run's elements in the layout and in the residual."""
    code: slice
    """The run's bytes among all encoded bytes."""

    def vectors(self, flat: torch.Tensor) -> torch.Tensor:
        """A view with one tile per row."""
        return flat[self.elements].view(len(self.tiles), -1)

    def blocks(self, code: torch.Tensor) -> torch.Tensor:
        return code.view(len(self.tiles), -1)


class CodedStretches(CodedTiles):
    """See `Exchange`. Encodes and decodes on the device, for `CodedOnDevice`."""

    accelerator: Accelerator

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        geometry: Geometry,
        abort: Abort,
        codec: Codec,
        memory: dict[str, Segment] | None,
        on: Accelerator,
    ) -> None:
        super().__init__(rendezvous, rank, geometry, abort, codec, memory, on)
        self._watch = Stopwatch(on.device)
        length = self._encoded_sums.numel()
        self._code = torch.zeros(length, dtype=torch.uint8, device=on.device)
        """Encoded bytes of this step: first this member's parts and the sums that it owns, then the sums of all
        members."""
        self._vectors = [slot.tensor(torch.float32, 0, geometry.slot_bytes // 4) for slot in self.slots]
        self._total = self.totals.tensor(torch.float32, 0, geometry.slot_bytes // 4)
        self._runs: dict[range, list[Run]] = {}
        """Tiles of a stretch -> its runs."""
        for stretch in stretches(geometry.tiles, geometry.gradient_tiles):
            if stretch.tiles.start in self.compression.tiles:
                self._runs[stretch.tiles] = self._cut(stretch.tiles)
        self._every_run = list(itertools.chain(*self._runs.values()))
        self._segments = [on.beside(length) for _ in range(2)]
        self._parts, self._encoded_sums = (one.tensor(torch.uint8, 0, length) for one in self._segments)
        for tile in self._packed:
            self._outbox[tile] = self._parts[self._starts[tile] : self._starts[tile] + self._sizes[tile]]
        self._received: dict[tuple[int, range], torch.Tensor] = {}
        """(sender, tiles of a run that this member owns) -> the bytes that the sender sends of them."""
        others = [other for other in range(self.size) if other != rank]
        for run, other in itertools.product(self._every_run, others):
            if run.owner == rank:
                self._make_inbox(other, run)

    def _cut(self, tiles: range) -> list[Run]:
        found = []
        shapes = self._geometry.tiles
        for (owner, numel), some in itertools.groupby(tiles, lambda tile: (self._owner[tile], shapes[tile].numel)):
            mine = list(some)
            first, count = shapes[mine[0]].offset_bytes // 4, len(mine)
            code = slice(self._starts[mine[0]], self._starts[mine[-1]] + block.padded(self._sizes[mine[-1]]))
            found.append(Run(range(mine[0], mine[-1] + 1), owner, slice(first, first + count * numel), code))
        return found

    def _make_inbox(self, other: int, run: Run) -> None:
        self._segments.append(self.accelerator.beside(run.code.stop - run.code.start))
        box = self._received[other, run.tiles] = self._segments[-1].tensor(
            torch.uint8, 0, self._segments[-1].size_bytes
        )
        for tile, content in zip(run.tiles, run.blocks(box), strict=True):
            self._inbox[other, tile] = content[: self._sizes[tile]]

    def _begin_packed(self) -> None:
        self._watch.reset()
        super()._begin_packed()

    def encode(self, tiles: range) -> None:
        for run in self._runs[tiles]:
            if run.owner == self.rank:
                continue
            if self._sources:
                self._write(run, self._part_of(run))
                self._parts[run.code].copy_(self._code[run.code], non_blocking=True)
            else:
                self.residuals.keep(run.elements)

    def _publish_packed(self, tile: int) -> None:
        if self._sources and self._owner[tile] != self.rank:
            self._send(tile)

    def _part_of(self, run: Run) -> torch.Tensor:
        """This member's part of the run's sum."""
        parts = [run.vectors(self._vectors[source.slot]) for source in self._sources]
        return sum(parts[1:], parts[0])

    def _write(self, run: Run, vectors: torch.Tensor) -> None:
        with self._watch.running():
            rests = run.vectors(self.residuals.after).copy_(run.vectors(self.residuals.before))
            block.write_rows(self._coding.codec, rests, vectors, run.blocks(self._code[run.code]))

    def _read(self, run: Run, code: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        with self._watch.running():
            block.read_rows(self._coding.codec, run.blocks(code), out)
        return out

    def _encode_sums(self) -> None:
        for run in self._every_run:
            if run.owner == self.rank:
                self._write(run, self._sum_of(run))
                self._encoded_sums[run.code].copy_(self._code[run.code], non_blocking=True)
        self.accelerator.finish()

    def _sum_of(self, run: Run) -> torch.Tensor:
        total = run.vectors(self._total)
        if self._sources:
            total.copy_(self._part_of(run))
        else:
            total.zero_()
        for rank in sorted(self._senders - {self.rank}):
            wait_all([self._arrivals[rank, tile] for tile in run.tiles])
            code = self._received[rank, run.tiles].to(self.accelerator.device, non_blocking=True)
            total.add_(self._read(run, code, torch.empty_like(total)))
        return total

    def _collect_packed(self) -> None:
        self._code.copy_(self._encoded_sums, non_blocking=True)
        for run in self._every_run:
            self._read(run, self._code[run.code], run.vectors(self._total))
        if self._measures:
            self._codec_s = self._watch.take()

    def _probe(self) -> float:
        self._watch.reset()
        code = torch.empty_like(self._code)
        rooms = [torch.zeros_like(run.vectors(self._total)) for run in self._every_run]
        for run, room in zip(self._every_run, rooms, strict=True):
            with self._watch.running():
                block.write_rows(self._coding.codec, room, run.vectors(self._vectors[0]), run.blocks(code[run.code]))
        encode_s = self._watch.take()
        for run, room in zip(self._every_run, rooms, strict=True):
            self._read(run, code[run.code], room)
        return self._of_a_step(encode_s, self._watch.take())


class CodedOnDevice(DeviceExchange):
    """See `Exchange`. `coder`: the exchange that compresses and sends the gradients, made for the same accelerator."""

    def __init__(self, coder: CompressedExchange, geometry: Geometry, on: Accelerator) -> None:
        super().__init__(coder, geometry, on.device, on.kept)
        self.coder = coder
        self._slots = {index: self._shaped(memory) for index, memory in enumerate(coder.slots)}
        self._sums = self._shaped(coder.totals)

    def _is_coded(self, tile: int) -> bool:
        """Whether this tile is compressed in this step. All tiles of a stretch are, or none."""
        return self.coder.packing and tile in self.coder.compression.tiles

    def _copy_out(self, number: int) -> None:
        tiles = self.stretches[number].tiles
        if self._is_coded(tiles.start):
            self.coder.encode(tiles)
        else:
            super()._copy_out(number)

    def _outgoing(self, source: Source, number: int) -> torch.Tensor:
        part = super()._outgoing(source, number)
        return part + self._owed(number) if self.coder.releases(source, self.stretches[number].tiles.start) else part

    def _owed(self, number: int) -> torch.Tensor:
        stretch = self.stretches[number]
        first = stretch.offset_bytes // 4
        return self.coder.residuals.before[first : first + stretch.numel]

    def _add_up(self) -> Slot:
        if self.size > 1:
            self.coder.reduced(0)  # all sums come with the first
            return super()._add_up()
        alone = super()._add_up()
        for number, stretch in enumerate(self.stretches):
            if any(self.coder.releases(source, stretch.tiles.start) for source in self._plan.sources):
                alone.stretches[number].add_(self._owed(number))
        return alone

    def _added_on_host(self) -> Sequence[int]:
        return [tile for tile in self.tiles if not self._is_coded(tile)]
