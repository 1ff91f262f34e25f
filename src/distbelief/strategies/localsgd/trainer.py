"""Trains one replica between two outer steps: local steps on a copy of the parameters, with the replica's own
optimizer.

The result of a replica's round is a pure function of (committed values, the replica's inner state, samples, seeds); any
member may train it. A local step is a step of allreduce on the replica's own shards: the same tree, the same rules for
untouched parameters, clipping and buffers.

`DeviceTrainer` does the same on an accelerator. The committed state and the inner states stay in host memory, where no
death loses them. A round copies them to the device once, takes all local steps there, and copies back the difference
and the inner state.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from distbelief.compression.parts import PartsCoding
from distbelief.data.sources import seed_everything
from distbelief.errors import NonFiniteLoss
from distbelief.job import Job
from distbelief.shards import mix, shard_seed
from distbelief.strategies.base import Fetch
from distbelief.strategies.flatmodel.compute import ShardComputer, ShardResult
from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.flatmodel.rules.stepwork import integers_differ, partial_sums
from distbelief.strategies.flatmodel.tileoptimizer import Recipe, TileMemory, TileOptimizer, norms, state_bytes
from distbelief.strategies.localsgd.innerstates import kept_bytes, owed
from distbelief.strategies.localsgd.rules.rounds import Rounds
from distbelief.transport.device.accelerator import DeviceMemory, pin
from distbelief.transport.device.exchange import STRETCH_BYTES, Stretch, stretches, when_whole
from distbelief.transport.exchange import Tile
from distbelief.transport.shm.segment import Memory, Segment

NUMBERS_PER_STEP = 3
"""A replica reports these numbers for each of its steps: sum of the loss, its weight, samples."""
NO_CHECKSUM = -1.0
"""Stands for the checksum of the integer buffers of a replica that had no samples in some step: they lag behind."""


@dataclass(frozen=True)
class RoundStart:
    """The state with which a replica begins a round."""

    values: Memory
    """The committed parameters and float buffers, in the layout."""
    values_at: int
    """Their first byte."""
    integers: bytes
    """The committed integer buffers."""
    kept: torch.Tensor
    """The replica's inner state."""


@dataclass(frozen=True)
class RoundResult:
    reported: np.ndarray
    """The reported numbers, of shape (steps of the round, NUMBERS_PER_STEP)."""
    integers: float
    """A checksum of the integer buffers, or NO_CHECKSUM."""
    touched: np.ndarray
    """Per entry of the layout: whether any step gave the parameter a gradient, or changed the buffer."""


class LocalTrainer(ShardComputer):
    """Trains replicas with one model, one after the other. Between rounds the model's parameters are the committed
    ones."""

    _grain_bytes = 1
    """The least bytes for one operation. Here every tile gets its own operation, while it is in the cache."""

    def __init__(
        self, job: Job, model: torch.nn.Module, layout: Layout, device: torch.device, recipe: Recipe,
        coding: PartsCoding | None = None,
    ) -> None:  # fmt: skip
        """`coding`: the compression of differences."""
        super().__init__(job, model, layout, device)
        self.recipe = recipe
        self.coding = coding
        self._grain = stretches(layout.tiles, layout.parameter_tiles, self._grain_bytes)
        self._values = self._room(layout.size_bytes)
        self.values = views(self._values, layout.tiles)
        """The values of the replica in training, or last trained."""
        self._began_at: list[torch.Tensor] = []
        """The replica's values at the start of the round, in pieces of the grain."""
        self._sizes = [state_bytes(recipe, layout, tile) for tile in range(layout.parameter_tiles)]
        self._keeping = Segment.private(kept_bytes(layout, recipe, coding))
        self.kept = self._keeping.tensor(torch.uint8, 0, self._keeping.size_bytes)
        """The replica's inner state: the bytes of its optimizer state, then its residual."""
        self._optimizer_state = self.kept
        """The memory in which the optimizers hold their state."""
        self._code = coding.room() if coding else None
        self._slots: list[Memory] = []
        self._slot_tiles: list[list[torch.Tensor]] = []
        self._slot_parts: list[list[torch.Tensor]] = []
        self._fullest: bytes | None = None

    def train(
        self, rounds: Rounds, number: int, replica: int, beginning: RoundStart, fetch: Fetch,
        working: Callable[[int], None],
    ) -> RoundResult:  # fmt: skip
        """Take the round's local steps. `working` is called with every shard before it is computed."""
        self.kept.copy_(beginning.kept)
        self._began_at = self._bring_in(beginning)
        for mine, value in zip(views(self._values, self._grain), self._began_at, strict=True):
            mine.copy_(value)
        self.commit_integers(beginning.integers)
        self.bind_parameters(self._values, 0)
        optimizers = self._make_optimizers()
        reported = np.zeros((len(rounds.steps(number)), NUMBERS_PER_STEP))
        touched = np.zeros(len(self.layout.entries), np.uint8)
        first, end = rounds.group(replica)
        full = True
        for place, step in enumerate(rounds.steps(number)):
            busy = min(end, rounds.schedule.occupied(step)) - first
            if busy <= 0:  # the last batch of an epoch has no samples for this replica
                full = False
                continue
            results = self._compute(step, (first, end), busy, fetch, working)
            reported[place] = (
                math.fsum(result.loss_sum for result, _ in results),
                math.fsum(result.weight for result, _ in results),
                sum(samples for _, samples in results),
            )
            marks = np.bitwise_or.reduce([result.touched for result, _ in results])
            if reported[place][1] == 0:  # zero weight: as if no parameter had a gradient
                marks[: len(self.parameters)] = 0
            self._update(step, replica, optimizers, float(reported[place][1]), marks, busy)
            touched |= marks
        self._bring_out()
        integers = self.integer_bytes()
        if full:
            self._fullest = integers
        return RoundResult(reported, float(zlib.crc32(integers)) if full else NO_CHECKSUM, touched)

    def _room(self, size_bytes: int) -> Memory:
        """Memory for training."""
        return Segment.private(size_bytes)

    def _bring_in(self, beginning: RoundStart) -> list[torch.Tensor]:
        """Copy the start of a round to where the replica is trained. Returns its values, in pieces of the grain."""
        return views(beginning.values, self._grain, beginning.values_at)

    def _bring_out(self) -> None:
        """Copy the inner state back to `kept`."""

    def adopt_integers(self) -> None:
        """After a round: commit the integer buffers of a replica, among those trained here, that had samples in every
        step."""
        if self._fullest is not None:
            self.commit_integers(self._fullest)
        self._fullest = None

    def write_difference(self, slot: Memory) -> None:
        """Write the outer step's gradient: the values at the start of the round minus the present values. Float buffers
        are written as they are."""
        places, trained = views(slot, self._grain), views(self._values, self._grain)
        for some, before, after, place in zip(self._grain, self._began_at, trained, places, strict=True):
            if some.tiles.stop <= self.layout.parameter_tiles:
                torch.sub(before, after, out=place)
            else:
                place.copy_(after)

    def encode_difference(self, slot: Memory, touched: np.ndarray, code: torch.Tensor | None = None) -> None:
        """Replace the difference in the slot by its decoded encoding, and keep the error as residual. `code`: receives
        the encoded bytes; None: nothing is sent."""
        if self.coding is None or self._code is None:
            return
        rest = owed(self.kept, self.coding)
        self.coding.write(slot, rest, touched, self._code if code is None else code)

    # --- one local step ----------------------------------------------------------------------------------------------

    def _compute(
        self, step: int, group: tuple[int, int], busy: int, fetch: Fetch, working: Callable[[int], None]
    ) -> list[tuple[ShardResult, int]]:
        """Forward and backward of the replica's shards; their sum is in the first slot. Returns (result, samples)."""
        size = group[1] - group[0]
        results = []
        for unit in partial_sums(size, busy, (0, size)).work:
            shard = group[0] + unit.shard
            working(shard)
            batch, samples = fetch(step, shard, shard + 1)
            seed = shard_seed(self.job.seed, step, shard)
            slot, ready = self._slot(unit.slot), when_whole(self._grain, partial(self._add, unit.additions))
            result = self.run(batch, samples, seed, slot, self.values[self.layout.parameter_tiles :], ready)
            if not (math.isfinite(result.loss_sum) and math.isfinite(result.weight)):
                raise NonFiniteLoss(result.loss_sum, step, shard)
            results.append((result, samples))
        if len({result.integers for result, _ in results}) > 1:
            raise integers_differ()
        self.commit_integers()
        return results

    def _add(self, additions: Sequence[tuple[int, int]], some: int) -> None:
        for into, other in additions:
            self._slot_parts[into][some].add_(self._slot_parts[other][some])

    def _slot(self, index: int) -> Memory:
        while len(self._slots) <= index:
            slot = self._room(self.layout.size_bytes)
            self._slots.append(slot)
            self._slot_tiles.append(views(slot, self.layout.tiles))
            self._slot_parts.append(views(slot, self._grain))
        return self._slots[index]

    def _update(
        self, step: int, replica: int, optimizers: Sequence[tuple[int, TileOptimizer]], weight: float,
        touched: np.ndarray, shards: int,
    ) -> None:  # fmt: skip
        sums, count = self._slot_tiles[0], self.layout.parameter_tiles
        untouched = touched == 0
        if weight > 0:
            gradients = {tile: sums[tile] for tile in range(count)}
            self._scale(1.0 / weight)
            if (factor := self._clip_factor(sums[:count])) < 1.0:
                self._scale(factor)
            rate = self.job.rate_factor(step)
            skip = untouched if untouched[: len(self.parameters)].any() else None
            for first, optimizer in optimizers:
                if not self.recipe.elementwise:
                    seed_everything(mix(self.job.seed, 4, step, first, replica) >> 1)
                optimizer.update(gradients, rate, skip)
                optimizer.after_update(step, skip)
        for tile in range(count, len(self.layout.tiles)):
            average = sums[tile].div_(shards)
            for piece in self.layout.pieces[tile]:
                if not untouched[piece.entry]:  # the average of equal numbers may differ from them
                    part = slice(piece.tile_first, piece.tile_first + piece.numel)
                    self.values[tile][part] = average[part]

    def _scale(self, factor: float) -> None:
        """Multiply the gradients in the first slot by the factor."""
        for some, part in zip(self._grain, self._slot_parts[0], strict=True):
            if some.tiles.stop <= self.layout.parameter_tiles:
                part.mul_(factor)

    def _clip_factor(self, gradients: Sequence[torch.Tensor]) -> float:
        if self.job.clip_norm is None:
            return 1.0
        squares = [norm**2 for norm in norms(gradients)]
        return self.job.clip_factor(math.sqrt(math.fsum(squares)))

    def _make_optimizers(self) -> list[tuple[int, TileOptimizer]]:
        """(first tile, optimizer) for each set of tiles; the optimizers continue from the state in `kept`. An optimizer
        that is not element-wise gets one tile at a time, as in allreduce."""
        at, memory = 0, []
        for tile, size_bytes in enumerate(self._sizes):
            memory.append(TileMemory(tile, self.values[tile], self._optimizer_state[at : at + size_bytes]))
            at += size_bytes
        sets = [memory] if self.recipe.elementwise else [[one] for one in memory]
        return [(tiles[0].tile, TileOptimizer(self.recipe, self.layout, tiles)) for tiles in sets if tiles]


def views(memory: Memory, places: Sequence[Tile | Stretch], first_bytes: int = 0) -> list[torch.Tensor]:
    return [memory.tensor(one.dtype, first_bytes + one.offset_bytes, one.numel) for one in places]


class DeviceTrainer(LocalTrainer):
    """Trains replicas on an accelerator. Between rounds the model's parameters are a copy of the committed ones, made
    at the first use after a round."""

    _grain_bytes = STRETCH_BYTES

    def __init__(
        self, job: Job, model: torch.nn.Module, layout: Layout, device: torch.device, recipe: Recipe,
        coding: PartsCoding | None = None,
    ) -> None:  # fmt: skip
        super().__init__(job, model, layout, device, recipe, coding)
        self._optimizer_bytes = sum(self._sizes)
        self._optimizer_state = self._room(self._optimizer_bytes).tensor(torch.uint8, 0, self._optimizer_bytes)
        self._committed = self._room(layout.size_bytes)
        self._host: torch.Tensor | None = None
        """The committed values that are still to be copied to the device; None: the copy is up to date."""
        self._pin(self._keeping)

    def bind_parameters(self, values: Memory, offset_bytes: int) -> None:
        if values is self._values:
            super().bind_parameters(values, offset_bytes)
            return
        self._pin(values)
        self._host = values.tensor(torch.uint8, offset_bytes, self.layout.size_bytes)
        super().bind_parameters(self._committed, 0)

    def committed_buffers(self, values: Memory, offset_bytes: int) -> list[torch.Tensor]:
        return super().committed_buffers(self._committed, 0)

    def restore_buffers(self, committed: Sequence[torch.Tensor]) -> None:
        self._freshen()
        super().restore_buffers(committed)

    def _freshen(self) -> None:
        if self._host is not None:
            self._committed.tensor(torch.uint8, 0, self.layout.size_bytes).copy_(self._host)
            self._host = None

    def write_difference(self, slot: Memory) -> None:
        """Computed in the memory of the gradients, which are no longer needed."""
        self._pin(slot)
        made, size_bytes = self._slot(0), self.layout.size_bytes
        super().write_difference(made)
        slot.tensor(torch.uint8, 0, size_bytes).copy_(made.tensor(torch.uint8, 0, size_bytes))

    def _room(self, size_bytes: int) -> Memory:
        return DeviceMemory(size_bytes, self.device)

    def _bring_in(self, beginning: RoundStart) -> list[torch.Tensor]:
        self._optimizer_state.copy_(self.kept[: self._optimizer_bytes])
        self._freshen()
        return views(self._committed, self._grain)

    def _bring_out(self) -> None:
        self.kept[: self._optimizer_bytes].copy_(self._optimizer_state)

    def _pin(self, memory: Memory) -> None:
        if self.device.type == "cuda" and isinstance(memory, Segment):
            pin(memory)
