"""ps:async and ps:ssp on a worker whose gradients are compressed on their way to the servers.

What an encoding loses is the worker's residual: it goes with its next update, and is part of checkpoints. With a worker
that dies or leaves its residual is lost: what it has not sent of a few updates. A run that is resumed with another
number of workers gives the residual of rank r to rank r modulo that number.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from distbelief.compression.switch import Message, Switch
from distbelief.shards import Schedule
from distbelief.strategies.base import BeginFrom, Portion, Seat
from distbelief.strategies.base import Fetch as FetchBatch
from distbelief.strategies.dataparallel.compressed import OwingPortion
from distbelief.strategies.flatmodel.compute import ShardComputer
from distbelief.strategies.flatmodel.tileoptimizer import Recipe
from distbelief.strategies.ps.protocol.messages import Gradient, Lease
from distbelief.strategies.ps.protocol.pushcoding import PushCoding
from distbelief.strategies.ps.strategy import ParameterServer
from distbelief.strategies.ps.tables.servedtables import ServedTables
from distbelief.strategies.ps.worker.asynchronous import AsynchronousReplica
from distbelief.strategies.ps.worker.exchange import ServedGroup
from distbelief.strategies.ps.worker.member import AlreadyCopied
from distbelief.strategies.ps.worker.owing import Owed, stays
from distbelief.transport.shm.segment import Segment

_HEAD = 4096


class CompressedPushes(AsynchronousReplica):
    _fetched_s = 0.0
    """What the last fetch took."""

    def __init__(
        self, computer: ShardComputer, recipe: Recipe, schedule: Schedule, seat: Seat, exchange: ServedGroup,
        fetch: FetchBatch, tables: ServedTables, strategy: ParameterServer, begin_from: BeginFrom,
    ) -> None:  # fmt: skip
        super().__init__(computer, recipe, schedule, seat, exchange, fetch, tables, strategy)
        layout = computer.layout
        self._codings = [PushCoding(strategy.compression, shape, layout) for shape in self._slices]
        self._outboxes = [torch.zeros(coding.size_bytes, dtype=torch.uint8) for coding in self._codings]
        self._switch = Switch(strategy.compression)
        self._decode_s = 0.0
        self._owed = Owed(layout, strategy.compression)
        elements = layout.size_bytes // 4
        memory = exchange.memory("residuals of pushes", _HEAD + 4 * elements)
        self._life = np.frombuffer(memory.buffer, np.int64, 1)
        self._bytes = np.frombuffer(memory.buffer, np.int64, 2, 8)
        """Sent, and what they would have been uncompressed."""
        self._residual = memory.tensor(torch.float32, _HEAD, elements)
        self._rests = {
            tile: self._residual[at : at + layout.tiles[tile].numel]
            for coding in self._codings
            for tile in coding.coded
            for at in [layout.tiles[tile].offset_bytes // 4]
        }
        self._stays = bool(exchange.slot(0)[1]) and not strategy.always
        if self._stays:
            self.news.append(stays(strategy))
        self._take_up(begin_from)

    def _take_up(self, begin_from: BeginFrom) -> None:
        """Where the parameters have begun from a checkpoint, what was owed then is owed again."""
        life = self._client.life
        if self._life[0] == life:
            return
        self._life[0] = life
        self._residual.zero_()
        seat = self.exchange.rank, self.exchange.size
        self._owed.add_once(begin_from, self._applied, self._began, seat, self._residual)

    # --- updates -----------------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        started = time.perf_counter()
        super().fetch()
        self._fetched_s = time.perf_counter() - started

    def _push(self, lease: Lease, slot: Segment, name: str, touched: np.ndarray) -> None:
        if self._stays:
            super()._push(lease, slot, name, touched)
            return
        untouched = [place.part for _, place in self._owed.places if not touched[place.mark]]
        before = [self._residual[part].clone() for part in untouched]
        packing = self._strategy.always or self._switch.on
        started = time.perf_counter()
        parts = dict(enumerate(self._tiles(slot)))
        if packing or self._switch.probe_due:
            for coding, outbox in zip(self._codings, self._outboxes, strict=True):
                coding.write(parts, self._rests if packing else _copies(self._rests, coding.coded), outbox)
        encoded_s = time.perf_counter() - started
        if packing:
            self._push_coded(lease, touched)
        else:
            for tile, rest in self._rests.items():
                parts[tile].add_(rest)
                rest.zero_()
            super()._push(lease, slot, name, touched)
        for part, rest in zip(untouched, before, strict=True):  # what was sent of theirs was not used
            self._residual[part].copy_(rest)
        self._count(packing, encoded_s if packing or self._switch.probe_due else None)

    def _push_coded(self, lease: Lease, touched: np.ndarray) -> None:
        integers = (self._as_numbers() - self._base_integers).tobytes()
        for shape, outbox in zip(self._slices, self._outboxes, strict=True):
            mine = integers if shape.number == 0 else b""
            content = Gradient(lease.update, lease.step, touched.tobytes(), mine, coded=True)
            self._client.push(shape.number, content, outbox.numpy())
        self._client.settle(self._abort)

    def _count(self, packing: bool, encoded_s: float | None) -> None:
        """The link is measured where bytes alone are waited for: by the last fetch."""
        plain = sum(coding.plain_bytes for coding in self._codings)
        coded = sum(coding.size_bytes for coding in self._codings)
        self._bytes += (coded if packing else plain, plain)
        if self._strategy.always:
            return
        codec_s = None if encoded_s is None else encoded_s + self._decoding_s()
        was_on = self._switch.on
        self._switch = self._switch.after(Message(plain, plain, self._fetched_s, codec_s, coded))
        if self._switch.on != was_on:
            self.news.append(f"worker {self._seat.worker}: {self._switch.why}")

    def _decoding_s(self) -> float:
        """What a server takes for it, measured here once."""
        if not self._decode_s:
            out = {tile: torch.empty_like(part) for tile, part in enumerate(self._tiles(self.exchange.slot(0)[0]))}
            started = time.perf_counter()
            for coding, outbox in zip(self._codings, self._outboxes, strict=True):
                coding.read(outbox.numpy(), out)
            self._decode_s = time.perf_counter() - started
        return self._decode_s

    # --- for people --------------------------------------------------------------------------------------------------

    def traffic(self) -> tuple[int, int]:
        return int(self._bytes[0]), int(self._bytes[1])

    # --- for checkpoints ---------------------------------------------------------------------------------------------

    @cached_property
    def _owing(self) -> list[OwingPortion]:
        return self._owed.portions(self._portions)

    def _dense_portions(self) -> Sequence[Portion]:
        return self._owing

    def copy_portion(self, applied: int, into: Segment) -> AlreadyCopied:
        owing = self._owing[self.exchange.rank]
        into.tensor(torch.float32, owing.owed_at, owing.elements).copy_(self._residual[: owing.elements])
        return super().copy_portion(applied, into)


def _copies(rests: Mapping[int, torch.Tensor], tiles: Sequence[int]) -> dict[int, torch.Tensor]:
    return {tile: rests[tile].clone() for tile in tiles}
