"""local_sgd on a worker without a seat: the model made, laid out, and checked by the canary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from distbelief.compression.parts import PartsCoding
from distbelief.job import Job
from distbelief.shards import Range, Schedule
from distbelief.strategies.base import BeginFrom, Fetch, Seat, nothing_saved
from distbelief.strategies.dataparallel.compressed import compressing
from distbelief.strategies.dataparallel.prepared import PreparedModel
from distbelief.strategies.flatmodel.rules.stepwork import slots_needed
from distbelief.strategies.flatmodel.tileoptimizer import Recipe, state_bytes
from distbelief.strategies.localsgd.innerstates import InnerStates, optimizer_bytes
from distbelief.strategies.localsgd.replica import LocalReplica
from distbelief.strategies.localsgd.rules.rounds import Rounds, RoundSettings, group_of
from distbelief.strategies.localsgd.strategy import LocalSGD
from distbelief.strategies.localsgd.trainer import NUMBERS_PER_STEP, DeviceTrainer, LocalTrainer
from distbelief.transport.exchange import ROW, Exchange, Geometry


class PreparedLocalSGD(PreparedModel):
    """The model of local_sgd; its members divide replicas among themselves. See `Prepared`."""

    def __init__(self, job: Job, schedule: Schedule, device: torch.device, settings: RoundSettings) -> None:
        super().__init__(job, schedule, device)
        self._settings = settings
        self.shards = settings.replicas
        self._compression = None
        if method := settings.compression:
            self._compression = compressing(self._layout, method, job.seed, always=True, apart=True)
        coding = PartsCoding(settings.compression, self._compression.places) if self._compression else None
        kind = LocalTrainer if device.type == "cpu" else DeviceTrainer
        self._trainer = kind(job, self.model, self._layout, device, self._recipe, coding)
        self._computer = self._trainer
        outer = partial(torch.optim.SGD, **settings.outer)
        self._outer = Recipe(outer, self._trainer.parameters, self._recipe.functions)

    def least_bytes(self) -> int:
        """The sum of:

        - a slot for differences;
        - the values and a gradient of the replica in training;
        - two copies of the values and of the outer optimizer's state;
        - the inner state of the replica in training;
        - all inner states, before and after a round.
        """
        layout = self._layout
        if self._device.type != "cpu":
            return self._device_bytes()
        outer = sum(state_bytes(self._outer, layout, tile) for tile in range(layout.parameter_tiles))
        inner = len(self._trainer.kept)
        return 3 * layout.size_bytes + 2 * (layout.size_bytes + outer) + (1 + 2 * self.shards) * inner

    def _device_bytes(self) -> int:
        """On the device: the committed values and those of a replica; a gradient per level of its tree; its optimizer
        state."""
        layout, largest = self._layout, -(-self._schedule.shards // self.shards)
        slots = slots_needed(largest, (0, largest))
        return (2 + slots) * layout.size_bytes + optimizer_bytes(layout, self._recipe)

    def geometry(self, ranges: Sequence[Range]) -> Geometry:
        return Geometry(
            tiles=self._layout.tiles,
            slot_bytes=self._layout.size_bytes,
            slots=[self._slots(mine) for mine in ranges],
            shards=self.shards,
            marks=len(self._layout.entries),
            integer_bytes=len(self._trainer.integer_bytes()),
            row=ROW + NUMBERS_PER_STEP * self._settings.steps,
            compression=self._compression,
        )

    def _slots(self, mine: Range) -> int:
        """The number of slots. Over a network, members do not add up compressed differences before they send them."""
        return max(slots_needed(self.shards, mine), mine[1] - mine[0] if self._compression else 0)

    def groups(self, mine: Range) -> list[list[Range]]:
        groups = [group_of(self._schedule.shards, self.shards, replica) for replica in range(*mine)]
        return [[(shard, shard + 1) for shard in range(*group)] for group in groups]

    def build(
        self, seat: Seat, exchange: Exchange, fetch: Fetch, begin_from: BeginFrom = nothing_saved
    ) -> LocalReplica:
        rounds = Rounds(self._schedule, self._settings.steps, self.shards, seat.steps)
        inner = InnerStates(exchange, seat.ranges, len(self._trainer.kept), self._settings.sends_copies)
        return LocalReplica(self._trainer, self._outer, rounds, seat, inner, fetch, begin_from)


def prepare(strategy: LocalSGD, job: Job, schedule: Schedule, device: torch.device) -> PreparedLocalSGD:
    settings = RoundSettings(
        strategy.steps, strategy.replicas_of(job), strategy.outer_options, strategy.compression, strategy.sends_copies
    )
    return PreparedLocalSGD(job, schedule, device, settings)
