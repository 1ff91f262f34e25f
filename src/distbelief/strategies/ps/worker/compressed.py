"""Compressed pushes, in all modes: a worker encodes its pushes, and keeps each encoding's error (error feedback).

The error is the worker's residual; it is added to the worker's next push, and is part of checkpoints. The residual of a
worker that dies or leaves is lost. A run that is resumed with another number of workers gives the residual of rank r to
rank r modulo that number.

In `ps:sync` a shard's encoded gradient depends on the worker that computes it. So a step belongs to one generation: the
pushes of the last generation count only if all of them arrived; otherwise none of them does (`RestartStep`). A residual
belongs to a number of applied steps (compression/residuals.py), so a step that begins again finds its residual again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import torch

from distbelief.compression.residuals import Residuals
from distbelief.compression.switch import Message, Switch
from distbelief.errors import DistBeliefError
from distbelief.shards import Schedule
from distbelief.strategies.base import BeginFrom, Portion, Seat, StepResult
from distbelief.strategies.base import Fetch as FetchBatch
from distbelief.strategies.dataparallel.compressed import OwingPortion, compressing
from distbelief.strategies.flatmodel.compute import ShardComputer
from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.flatmodel.namedtensors import RESIDUAL, TilePortion
from distbelief.strategies.flatmodel.tileoptimizer import Recipe
from distbelief.strategies.ps.protocol.messages import Gradient, LeasedUpdate, PartialSum, PulledValues, RestartStep
from distbelief.strategies.ps.protocol.pushcoding import PushCoding
from distbelief.strategies.ps.rules.options import ParameterServerOptions
from distbelief.strategies.ps.rules.slicing import SliceShape
from distbelief.strategies.ps.tables.remote import RemoteTables
from distbelief.strategies.ps.worker.asynchronous import AsynchronousReplica
from distbelief.strategies.ps.worker.exchange import ServerExchange
from distbelief.strategies.ps.worker.member import AlreadyCopied
from distbelief.strategies.ps.worker.synchronous import SynchronousReplica
from distbelief.transport.exchange import CompressedParameter
from distbelief.transport.shm.segment import Segment


class OwedResiduals:
    """The residuals of all members under their names in checkpoints, and their distribution when a run is resumed."""

    def __init__(self, layout: Layout, method: str) -> None:
        self.places: list[tuple[str, CompressedParameter]] = [
            (layout.entries[place.mark].name, place) for place in compressing(layout, method, 0, False).places
        ]

    def portions(self, tiles: Sequence[TilePortion]) -> list[OwingPortion]:
        """Every member's portion: its tiles, then its residual."""
        return [
            OwingPortion(one, {f"{RESIDUAL}{rank}/{name}": (place.part, place.shape) for name, place in self.places})
            for rank, one in enumerate(tiles)
        ]

    def add(self, saved: Mapping[str, torch.Tensor], rank: int, size: int, into: torch.Tensor) -> None:
        """Add the saved residuals that the member of this rank takes over."""
        members = {int(name.removeprefix(RESIDUAL).partition("/")[0]) for name in saved if name.startswith(RESIDUAL)}
        for member in sorted(one for one in members if one % size == rank):
            for name, place in self.places:
                if (key := f"{RESIDUAL}{member}/{name}") in saved:
                    into[place.part].add_(saved[key].reshape(-1))

    def add_once(
        self, begin_from: BeginFrom, applied: int, began: int, seat: tuple[int, int], into: torch.Tensor
    ) -> None:
        """For a member without a residual: `add`, only if no step was applied since step `began`; after that the saved
        residuals have been pushed already. `seat`: (rank, number of members)."""
        if applied == began:
            self.add(saved_tensors(begin_from, applied), *seat, into)


def uncompressed_notice(strategy: ParameterServerOptions) -> str:
    """A line for the user: nothing is compressed in shared memory."""
    return f"gradients stay in shared memory, so {strategy.compression} is off (it is on with tcp, or with always)"


def saved_tensors(begin_from: BeginFrom, step: int) -> Mapping[str, torch.Tensor]:
    """The tensors of the checkpoint of exactly this step; empty: it does not exist."""
    try:
        saved = begin_from(step) if step else None
    except DistBeliefError:  # the run has gone on since the last checkpoint
        saved = None
    return saved.tensors if saved is not None and saved.step == step else {}


Rests = dict[int, torch.Tensor]
"""Tile -> its residual."""


class CompressedSynchronousReplica(SynchronousReplica):
    """See `Replica`."""

    def __init__(
        self, computer: ShardComputer, recipe: Recipe, schedule: Schedule, seat: Seat, exchange: ServerExchange,
        fetch: FetchBatch, tables: RemoteTables, strategy: ParameterServerOptions, begin_from: BeginFrom,
    ) -> None:  # fmt: skip
        self._arrivals: list[tuple[float, int]] = []
        """(time, bytes) of every slice whose values came."""
        super().__init__(computer, recipe, schedule, seat, exchange, fetch, tables)
        layout = computer.layout
        self._strategy = strategy
        self._codings = [PushCoding(strategy.compression, shape, layout) for shape in self._slices]
        self._slot_tiles: dict[int, list[torch.Tensor]] = {}
        self._outboxes: dict[tuple[int, int], torch.Tensor] = {}
        """(slot, slice) -> the memory of its encoded stretch."""
        self._owed = OwedResiduals(layout, strategy.compression)
        self._residuals = Residuals(exchange.own, layout.size_bytes // 4)
        self._switch = Switch(strategy.compression)
        self._packing = True
        self._encodes = False
        """Whether this member computes shards of the step, and does not only wait for it."""
        self._codec_s, self._decode_s = 0.0, 0.0
        self._sent = np.zeros(2, np.int64)
        """Bytes that were pushed in this step, and their number without compression."""
        self._take_up(begin_from)

    def _begin_generation(self, step: int, complete: bool) -> None:
        if not complete:
            self._takeover = None
        if self.exchange.rank == 0:
            for shape in self._slices:
                self._client.push(shape.number, RestartStep(step + complete, self._seat.generation))
            self._client.settle(self.exchange.abort)

    def _take_up(self, begin_from: BeginFrom) -> None:
        """If a life begins here and no step was applied in it, take over saved residuals. A member that joins later
        begins without one."""
        life = np.frombuffer(self.exchange.memory("life of residuals", 8).buffer, np.int64, 1)
        knows = life[0] == self._client.life
        nobody = not any(self.exchange.gather(b"known" if knows else b""))
        if knows:
            return
        vector = torch.zeros_like(self._residuals.before)
        if nobody:
            saved = saved_tensors(begin_from, self._applied)
            self._owed.add(saved, self.exchange.rank, self.exchange.size, vector)
        self._residuals.put(self._applied, vector)
        life[0] = self._client.life

    # --- a step ------------------------------------------------------------------------------------------------------

    def compute(self, step: int) -> None:
        self._encodes = not (self._takeover and self._takeover[0] == step)
        if self._encodes:
            self._residuals.begin(step)
            self._residuals.keep(slice(None))
        self._packing = self._strategy.always or self._switch.on
        self._codec_s = 0.0
        self._sent[:] = 0
        super().compute(step)

    def _packed(self, node: PartialSum, shape: SliceShape, slot: int, touched: np.ndarray) -> tuple[PartialSum, Any]:
        coding, views = self._codings[shape.number], self._sent_tiles(slot)
        parts, rests = {tile: views[tile] for tile in shape.tiles}, self._rests[1 - self._residuals.present]
        node = msgspec.structs.replace(node, segment="", generation=self._seat.generation, coded=self._packing)
        started = time.perf_counter()
        payload: Any = self.exchange.slot(slot)[0].view(shape.first_byte, shape.value_bytes)
        with self._without(coding, rests, touched):
            if self._packing:
                payload = self._outbox(slot, shape.number)
                coding.write(parts, rests, payload)
                payload = payload.numpy()
            else:
                for tile in coding.coded:
                    parts[tile].add_(rests[tile])
                    rests[tile].zero_()
        self._codec_s += time.perf_counter() - started if self._packing else 0.0
        self._sent += (len(payload), coding.plain_bytes)
        return node, payload

    @contextmanager
    def _without(self, coding: PushCoding, rests: Rests, touched: np.ndarray) -> Iterator[None]:
        """Keep the residuals of parameters that this member has not touched: a slice may not use the values sent for
        them."""
        pieces = self._computer.layout.pieces
        kept = [
            (part, part.clone())
            for tile in coding.coded
            for piece in pieces[tile]
            if not touched[piece.entry]
            for part in [rests[tile][piece.tile_first : piece.tile_first + piece.numel]]
        ]
        for part, _ in kept:
            part.zero_()
        yield
        for part, before in kept:
            part.copy_(before)

    def _sent_tiles(self, slot: int) -> list[torch.Tensor]:
        """A partial sum in the memory from which it is sent."""
        if slot not in self._slot_tiles:
            segment, _ = self.exchange.slot(slot)
            tiles = self._computer.layout.tiles
            self._slot_tiles[slot] = [segment.tensor(t.dtype, t.offset_bytes, t.numel) for t in tiles]
        return self._slot_tiles[slot]

    def _outbox(self, slot: int, number: int) -> torch.Tensor:
        if (slot, number) not in self._outboxes:
            self._outboxes[slot, number] = torch.zeros(self._codings[number].size_bytes, dtype=torch.uint8)
        return self._outboxes[slot, number]

    @cached_property
    def _rests(self) -> list[Rests]:
        """Both copies of the residual, by tile."""
        tiles = self._computer.layout.tiles
        coded = [tile for coding in self._codings for tile in coding.coded]
        return [
            {t: vector[tiles[t].offset_bytes // 4 :][: tiles[t].numel] for t in coded}
            for vector in self._residuals.vectors
        ]

    def _sending(self, step: int) -> None:
        if self._encodes:
            self._residuals.mark_complete()

    def commit(self, step: int) -> StepResult:
        self._arrivals.clear()
        result = super().commit(step)
        if self._sent[1]:
            self._residuals.count(*self._sent.tolist())
            self._measure_codec()
        return result

    # --- whether compression pays ------------------------------------------------------------------------------------

    def _take(self, message: PulledValues, payload: Any) -> None:
        super()._take(message, payload)
        self._arrivals.append((time.perf_counter(), self._slices[message.slice].value_bytes))

    def _measure_codec(self) -> None:
        """Measure the link where members wait only for bytes: from the first slice that came to the last."""
        if self._strategy.always or len(self._arrivals) < 2:
            return
        plain = int(self._sent[1])
        codec_s = None
        if self._packing:
            codec_s = self._codec_s + self._decoding_s() * plain / sum(one.plain_bytes for one in self._codings)
        elif self._switch.probe_due:
            codec_s = self._probe()
        coded = sum(one.size_bytes for one in self._codings) * plain // sum(one.plain_bytes for one in self._codings)
        fetched_s = self._arrivals[-1][0] - self._arrivals[0][0]
        fetched_bytes = sum(size_bytes for _, size_bytes in self._arrivals[1:])
        was_on = self._switch.on
        self._switch = self._switch.after(Message(plain, fetched_bytes, fetched_s, codec_s, coded))
        if self._switch.on != was_on:
            self.news.append(f"worker {self._seat.worker}: {self._switch.why}")

    def _decoding_s(self) -> float:
        """The time that servers need to decode a partial sum, measured here once."""
        if not self._decode_s:
            out = {tile: torch.empty_like(part) for tile, part in enumerate(self._sent_tiles(0))}
            started = time.perf_counter()
            for coding in self._codings:
                coding.read(self._outbox(0, coding.number).numpy(), out)
            self._decode_s = time.perf_counter() - started
        return self._decode_s

    def _probe(self) -> float:
        """The time to encode and decode the partial sum in this member's first slot."""
        parts = dict(enumerate(self._sent_tiles(0)))
        rests = {tile: torch.zeros_like(rest) for tile, rest in self._rests[0].items()}
        started = time.perf_counter()
        for coding in self._codings:
            coding.write(parts, rests, self._outbox(0, coding.number))
        encode_s, self._decode_s = time.perf_counter() - started, 0.0
        return encode_s + self._decoding_s()

    def traffic(self) -> tuple[int, int]:
        return self._residuals.traffic

    # --- for checkpoints ---------------------------------------------------------------------------------------------

    @cached_property
    def _owing(self) -> list[OwingPortion]:
        return self._owed.portions(self._portions)

    def _dense_portions(self) -> Sequence[Portion]:
        return self._owing

    def copy_portion(self, applied: int, into: Segment) -> AlreadyCopied:
        owing = self._owing[self.exchange.rank]
        owed, room = self._residuals.at(applied), into.tensor(torch.float32, owing.owed_at, owing.elements)
        if owed is None:
            room.zero_()
        else:
            room.copy_(owed[: owing.elements])
        return super().copy_portion(applied, into)


_HEAD = 4096


class CompressedAsynchronousReplica(AsynchronousReplica):
    _fetched_s = 0.0
    """The time of the last pull."""

    def __init__(
        self, computer: ShardComputer, recipe: Recipe, schedule: Schedule, seat: Seat, exchange: ServerExchange,
        fetch: FetchBatch, tables: RemoteTables, strategy: ParameterServerOptions, begin_from: BeginFrom,
    ) -> None:  # fmt: skip
        super().__init__(computer, recipe, schedule, seat, exchange, fetch, tables, strategy)
        layout = computer.layout
        self._codings = [PushCoding(strategy.compression, shape, layout) for shape in self._slices]
        self._outboxes = [torch.zeros(coding.size_bytes, dtype=torch.uint8) for coding in self._codings]
        self._switch = Switch(strategy.compression)
        self._decode_s = 0.0
        self._owed = OwedResiduals(layout, strategy.compression)
        elements = layout.size_bytes // 4
        memory = exchange.memory("residuals of pushes", _HEAD + 4 * elements)
        self._life = np.frombuffer(memory.buffer, np.int64, 1)
        self._bytes = np.frombuffer(memory.buffer, np.int64, 2, 8)
        """Bytes that were pushed, and their number without compression."""
        self._residual = memory.tensor(torch.float32, _HEAD, elements)
        self._rests = {
            tile: self._residual[at : at + layout.tiles[tile].numel]
            for coding in self._codings
            for tile in coding.coded
            for at in [layout.tiles[tile].offset_bytes // 4]
        }
        self._stays = bool(exchange.slot(0)[1]) and not strategy.always
        if self._stays:
            self.news.append(uncompressed_notice(strategy))
        self._take_up(begin_from)

    def _take_up(self, begin_from: BeginFrom) -> None:
        """If a life begins, take over saved residuals."""
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

    def _push(self, lease: LeasedUpdate, slot: Segment, name: str, touched: np.ndarray) -> None:
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
        for part, rest in zip(untouched, before, strict=True):  # servers did not use the values sent for them
            self._residual[part].copy_(rest)
        self._count(packing, encoded_s if packing or self._switch.probe_due else None)

    def _push_coded(self, lease: LeasedUpdate, touched: np.ndarray) -> None:
        integers = (self._as_numbers() - self._base_integers).tobytes()
        for shape, outbox in zip(self._slices, self._outboxes, strict=True):
            mine = integers if shape.number == 0 else b""
            content = Gradient(lease.update, lease.step, touched.tobytes(), mine, coded=True)
            self._client.push(shape.number, content, outbox.numpy())
        self._client.settle(self._abort)

    def _count(self, packing: bool, encoded_s: float | None) -> None:
        """Measure the link where the worker waits only for bytes: by the last pull."""
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
        """The time that servers need to decode a push, measured here once."""
        if not self._decode_s:
            out = {tile: torch.empty_like(part) for tile, part in enumerate(self._tiles(self.exchange.slot(0)[0]))}
            started = time.perf_counter()
            for coding, outbox in zip(self._codings, self._outboxes, strict=True):
                coding.read(outbox.numpy(), out)
            self._decode_s = time.perf_counter() - started
        return self._decode_s

    # --- for the user ------------------------------------------------------------------------------------------------

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
