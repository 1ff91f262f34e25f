"""The part of a worker that all modes of parameter servers share: a copy of the values, and the run's last results.

The state itself is on the servers; a checkpoint reads it from there. In `ps:sync` on one host the worker's values are
the servers' own memory (`MappedValues`): whole pages of a slice are mapped to their place among the worker's values,
and the few bytes at its ends, which share a page with the next slice, are copied. That is right only if no server
changes values with which a worker still computes. In `ps:sync` a server applies a step when all its sums are there, and
then no worker needs the values before it. A member whose shards others have computed may see a mixture; what it
computes from that counts for nothing.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distbelief.errors import DistBeliefError
from distbelief.shards import Range, Schedule
from distbelief.strategies.base import REMEMBERED, Applied, Fetch, Portion, RolledBack, Seat, Task
from distbelief.strategies.dataparallel.committed import CommittedModel
from distbelief.strategies.flatmodel.compute import ShardComputer
from distbelief.strategies.flatmodel.namedtensors import TilePortion, outside_of_tiles, whole_entries
from distbelief.strategies.flatmodel.tileoptimizer import Recipe
from distbelief.strategies.ps.protocol.client import Stop
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import (
    VALUES_AT,
    PulledValues,
    Question,
    ReadState,
    SliceState,
    values_at,
)
from distbelief.strategies.ps.rules.slicing import SliceShape, cut
from distbelief.strategies.ps.tables.remote import RemoteTables
from distbelief.strategies.ps.tables.saved import PortionWithTables
from distbelief.strategies.ps.worker.exchange import ServerExchange
from distbelief.transport.shm.segment import Memory, Segment

SUPPORTED = mmap.PAGESIZE == VALUES_AT
"""Whether values lie as far into a page as in the layout, so that whole pages can be mapped."""


def whole_pages(shape: SliceShape) -> Range:
    """The bytes of the layout that are whole pages of this slice. Empty if the slice is smaller than a page."""
    first = -(-shape.first_byte // VALUES_AT) * VALUES_AT
    return first, max(shape.end_byte // VALUES_AT * VALUES_AT, first)


class MappedValues:
    def __init__(self, values: Segment, server_memory: Callable[[str], Segment]) -> None:
        self._values = values
        self._server_memory = server_memory
        self._shown: dict[int, str] = {}
        """Slice -> the name of the mapped memory."""
        self._ends: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def take(self, shape: SliceShape, name: str) -> None:
        """Map the values of a slice from the memory of this name, and copy the ends that share a page with other
        slices."""
        if self._shown.get(shape.number) != name:
            self._map(shape, self._server_memory(name))
            self._shown[shape.number] = name
        for mine, theirs in self._ends[shape.number]:
            mine.copy_(theirs)

    def _map(self, shape: SliceShape, memory: Segment) -> None:
        ahead = values_at(shape.first_byte) - shape.first_byte
        first, end = whole_pages(shape)
        if first < end:
            self._values.lay(first, memory, ahead + first, end - first)
        ends = [(shape.first_byte, shape.end_byte)]
        if first < end:
            ends = [(shape.first_byte, first), (end, shape.end_byte)]
        self._ends[shape.number] = [
            (self._values.tensor(torch.uint8, a, b - a), memory.tensor(torch.uint8, ahead + a, b - a))
            for a, b in ends
            if a < b
        ]


class AlreadyCopied:
    """See `Copying`: a copy that is complete when it is made."""

    def __init__(self, outside: Mapping[str, torch.Tensor], waited_s: float) -> None:
        self.outside = outside
        self.waited_s = waited_s

    def run(self) -> None:
        """Nothing is left to do."""

    def finish(self) -> None:
        """Nothing is left to do."""


class ParameterServerMember:
    """The part of `Seated` that is the same in `ps:sync` and in the asynchronous modes."""

    _maps_values = False
    """On one host the worker's values are the servers' memory (`MappedValues`)."""

    def __init__(
        self, computer: ShardComputer, recipe: Recipe, schedule: Schedule, seat: Seat, exchange: ServerExchange,
        fetch: Fetch, tables: RemoteTables,
    ) -> None:  # fmt: skip
        self.exchange = exchange
        self.comm_s = 0.0
        self._computer = computer
        self._job = computer.job
        self._recipe = recipe
        self._schedule = schedule
        self._seat = seat
        self._fetch = fetch
        self._client = exchange.client
        self._slices = cut(computer.layout, recipe)
        self._tables = tables
        self._values: Memory
        self._mapped: MappedValues | None = None
        if self._maps_values and exchange.maps and not exchange.apart and SUPPORTED:
            # Memory of its own: a later generation that copies values must not write into a server's memory.
            mapped = exchange.memory("mapped values", computer.layout.size_bytes)
            self._mapped = MappedValues(mapped, exchange.server_memory)
            self._values = mapped
        else:
            self._values = exchange.values(computer.layout.size_bytes)
        self._segments: dict[str, torch.Tensor] = {}
        computer.bind_parameters(self._values, 0)
        self._buffers = computer.committed_buffers(self._values, 0)
        self._whole = CommittedModel(computer, self._buffers)
        self._past: deque[Applied] = deque(maxlen=REMEMBERED)
        self._note: tuple[int, bytes] = (-1, b"")
        self._applied = 0
        self._reached = np.frombuffer(exchange.memory("reached", 8).buffer, np.int64, 1)
        """The number of steps that this process has seen applied, in any generation."""
        self._rolled_back: RolledBack | None = None
        self.news: list[str] = []
        """Lines for the user."""

    def _check_slices(self, besides: int = 0) -> None:
        there = self._client.slices(self.exchange.abort) - besides
        mine = len(self._slices) + len(self._tables.slices)
        if there != mine:
            raise DistBeliefError(f"the servers have {there} slices, this worker {mine}: not the same job")

    def _note_rollback(self) -> None:
        """Called when the member has joined: a generation that is given up before reports no rollback."""
        if self._applied < self._reached[0]:
            self._rolled_back = RolledBack(int(self._reached[0]), self._applied, "checkpoint")
        self._reached[0] = self._applied

    def _take(self, message: PulledValues, payload: Any) -> None:
        """Take the values of a slice that was pulled."""
        shape = self._slices[message.slice]
        if self._mapped:
            self._mapped.take(shape, message.segment)
            return
        into = self._values.tensor(torch.uint8, shape.first_byte, shape.value_bytes)
        if not message.segment:
            into.copy_(torch.frombuffer(payload, dtype=torch.uint8))
            return
        if message.segment not in self._segments:
            memory = self.exchange.server_memory(message.segment)
            at = values_at(shape.first_byte)
            self._segments[message.segment] = memory.tensor(torch.uint8, at, shape.value_bytes)
        into.copy_(self._segments[message.segment])

    # --- results and notes -------------------------------------------------------------------------------------------

    def steps_applied(self) -> int:
        return self._applied

    def remembered(self, first: int) -> list[Applied]:
        return [one for one in list(self._past) if one.step >= first]

    def note(self) -> tuple[int, bytes]:
        return self._note

    def rolled_back(self) -> RolledBack | None:
        return self._rolled_back

    def waits(self) -> Mapping[int, float]:
        return {}

    def traffic(self) -> tuple[int, int]:
        return 0, 0

    def helped(self) -> int:
        return 0

    def plan_lines(self) -> Sequence[str]:
        lines, self.news = self.news, []
        return lines

    # --- the state ---------------------------------------------------------------------------------------------------

    @cached_property
    def _portions(self) -> list[TilePortion]:
        """Every member saves some slices; rank 0 also saves what lies in no tile."""
        size, outside = self.exchange.size, whole_entries(self._outside())
        return [
            TilePortion(
                self._computer.layout, self._recipe,
                [tile for shape in self._slices[rank::size] for tile in shape.tiles], outside if rank == 0 else [],
            )
            for rank in range(size)
        ]  # fmt: skip

    def _outside(self) -> dict[str, torch.Tensor]:
        return outside_of_tiles(self._computer.model, self._computer.layout, self._computer.integer_bytes())

    def portions(self) -> Sequence[Portion]:
        dense = self._dense_portions()
        if self._tables.slices:  # their number of rows grows with every step
            size, specs, counts = self.exchange.size, self._tables.specs, self._tables.counts(self._applied)
            self._with_tables = [
                PortionWithTables(one, specs, counts, range(rank, len(counts), size)) for rank, one in enumerate(dense)
            ]
            return self._with_tables
        return dense

    def _dense_portions(self) -> Sequence[Portion]:
        return self._portions

    def _read_portion(self, into: Segment, version: int, abort: Stop) -> AlreadyCopied:
        """Read this member's portion of the servers' state. `version`: the version that the slices must have."""
        started, rank = time.perf_counter(), self.exchange.rank
        portion, shapes = self._portions[rank], self._slices[rank :: self.exchange.size]
        missing: list[int] = []

        def read(framed: Framed) -> None:
            message: SliceState = framed.message
            if message.version < 0:
                missing.append(message.slice)
                return
            shape = self._slices[message.slice]
            at = portion.starts[shape.tiles[0]]
            into.tensor(torch.uint8, at, shape.size_bytes).copy_(torch.frombuffer(framed.payload, dtype=torch.uint8))

        self._whole.restore()
        self._client.ask([partial(_read, shape, version) for shape in shapes], abort, read)
        if missing:
            raise DistBeliefError(f"the servers have gone on from step {version} before it was saved")
        if self._tables.slices:
            mine = self._with_tables[rank]
            self._tables.read(mine.parts, version, partial(_copy_part, mine, into))
        return AlreadyCopied(self._outside() if rank == 0 else {}, time.perf_counter() - started)

    def measure(self, tasks: Sequence[Task], measure: Callable[[Task, Any, Any], None]) -> None:
        rank, size = self.exchange.rank, self.exchange.size
        self._whole.measure(tasks[rank * len(tasks) // size : (rank + 1) * len(tasks) // size], measure)

    def save_weights(self, path: Path) -> None:
        if self.exchange.rank == 0:
            self._digest = self._whole.save(path, self._tables.weights(self._applied))

    def weights_sha256(self) -> str:
        if not self._tables.slices:
            return self._whole.sha256()
        # The rows lie on servers: rank 0, which has saved them, has their hash.
        return self._digest if self.exchange.rank == 0 else ""


def _copy_part(portion: PortionWithTables, into: Segment, part: int, counts: list[int], content: Any) -> None:
    if counts != portion.shapes[part].counts:
        raise DistBeliefError(f"part {part} of the tables got other rows while it was being saved")
    size_bytes = portion.shapes[part].size_bytes
    if size_bytes:
        copy = into.tensor(torch.uint8, portion.starts[part], size_bytes)
        copy.copy_(torch.frombuffer(content, dtype=torch.uint8))


def _read(shape: SliceShape, version: int, ticket: int) -> Question:
    return ReadState(ticket, shape.number, version)
