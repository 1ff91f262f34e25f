"""The all-reduce replica on an accelerator: every member has its own state, and the host runs ahead of the device.

Launches per tile and transfers per shard, which are cheap on a CPU, are combined here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from distbelief.strategies.base import BeginFrom, Division, Fetch, Seat, StepResult, nothing_saved
from distbelief.strategies.dataparallel.replica import DataParallelReplica
from distbelief.strategies.flatmodel.compute import ShardComputer, ShardResult, move
from distbelief.strategies.flatmodel.copying import CopyPiece
from distbelief.strategies.flatmodel.rules.stepwork import ShardWork
from distbelief.strategies.flatmodel.tileoptimizer import Recipe, set_buffers
from distbelief.transport.device.accelerator import CopyStream, pin
from distbelief.transport.device.exchange import DeviceExchange, when_whole
from distbelief.transport.shm.segment import Segment


class DeviceReplica(DataParallelReplica):
    """See `Replica`. The exchange is DeviceExchange."""

    exchange: DeviceExchange

    def __init__(
        self, computer: ShardComputer, recipe: Recipe, schedule: Division, seat: Seat, exchange: DeviceExchange,
        fetch: Fetch, exact: bool, begin_from: BeginFrom = nothing_saved,
    ) -> None:  # fmt: skip
        self._batch_stream, self._copy_stream = CopyStream(exchange.device), CopyStream(exchange.device)
        self._under_way: list[tuple[int, int, Callable[[], ShardResult]]] = []
        super().__init__(computer, recipe, schedule, seat, exchange, self._sending(fetch), exact, begin_from)

    def _sending(self, fetch: Fetch) -> Fetch:
        """Send batches to the device on a separate stream, while it computes."""

        def fetch_and_send(step: int, first: int, end: int) -> tuple[Any, int]:
            batch, samples = fetch(step, first, end)
            with self._batch_stream.use():
                sent = move(batch, self.exchange.device)
            self._batch_stream.hand_over(sent)
            return sent, samples

        return fetch_and_send

    def compute(self, step: int) -> None:
        self._under_way.clear()
        super().compute(step)

    def _compute_units(self, step: int, units: Sequence[ShardWork]) -> None:
        super()._compute_units(step, units)
        if self._is_rechecked:
            self._finish_units()

    def _finish_units(self) -> None:
        """Wait for the results of the launched shards."""
        for one in self._under_way:
            super()._computed(*one)
        self._under_way.clear()

    def _computed(self, shard: int, samples: int, result: Callable[[], ShardResult]) -> None:
        self._under_way.append((shard, samples, result))

    def _tile_adder(self, unit: ShardWork, last: bool) -> Callable[[int], None]:
        """Like the base class, but for whole stretches: a launch costs as much for one tile as for a hundred."""

        def stretch_ready(number: int) -> None:
            for into, other in unit.additions:
                self.exchange.in_slot(into)[number].add_(self.exchange.in_slot(other)[number])
            if last:
                for tile in self.exchange.stretches[number].tiles:
                    self.exchange.publish(tile)

        return when_whole(self.exchange.stretches, stretch_ready)

    def commit(self, step: int) -> StepResult:
        self._finish_units()
        self.exchange.finish_copies()  # the device still computes: do not count this as communication
        return super().commit(step)

    def _update(self, step: int, scale: float, units: int, untouched: np.ndarray) -> None:
        if self._copies:
            self._finish_copies()
        sums = self.exchange.reduced_stretches()
        of_parameters = sums[: self._parameter_stretches]
        torch._foreach_mul_(of_parameters, scale)
        if self._job.clip_norm is not None:
            clip = self._clip_factor(1.0, step)
            if clip < 1.0:
                torch._foreach_mul_(of_parameters, clip)
        gradients = {tile: self.exchange.reduced(tile) for tile in self._tiles}
        rate = self._job.rate_factor(step)
        self._state.open_all(step)
        self._updates.apply(step, gradients, rate, untouched)
        for tile in self._buffer_tiles:
            average = self.exchange.reduced(tile).div_(units)
            set_buffers(self._state.values[tile], average, self._computer.layout.pieces[tile], untouched)
        self._state.close_all(step)

    @cached_property
    def _parameter_stretches(self) -> int:
        """The number of stretches with parameters; they come first. No stretch holds parameters and buffers."""
        last = self._computer.layout.parameter_tiles
        return sum(1 for stretch in self.exchange.stretches if stretch.tiles.stop <= last)

    def _clip_factor(self, scale: float, step: int) -> float:
        """As on the host: the norm is taken per tile in float64. One operation handles all tiles of one size."""
        sums = self.exchange.reduced_stretches()
        norms = [
            torch.linalg.vector_norm(sums[stretch][part].view(count, -1), dim=1, dtype=torch.float64)
            for stretch, part, count in self._even_parts
        ]
        squares = [norm**2 for norm in torch.cat(norms).tolist()]
        return self._job.clip_factor(math.sqrt(math.fsum(squares)))

    @cached_property
    def _even_parts(self) -> list[tuple[int, slice, int]]:
        """(stretch, slice of its elements, number of tiles of one size), over all parameters."""
        tiles, found = self._computer.layout.tiles, []
        for number, stretch in enumerate(self.exchange.stretches[: self._parameter_stretches]):
            first = 0
            for numel, some in itertools.groupby(tiles[index].numel for index in stretch.tiles):
                count = len(list(some))
                found.append((number, slice(first, first + count * numel), count))
                first += count * numel
        return found

    def _beside_steps(self, copy: CopyPiece) -> CopyPiece:
        mark = self._copy_stream.mark()

        def copy_on_stream(piece: int, to: Segment, at_bytes: int) -> None:
            with self._copy_stream.after(mark):
                if self.exchange.device.type == "cuda":
                    pin(to)  # on this stream's device, whatever the thread's own is
                copy(piece, to, at_bytes)
            self._copy_stream.finish()

        return copy_on_stream
