"""The workers' side. A vote is -1, 0 or 1, so the sum over the shards is a whole number, which float32 has exactly."""

from __future__ import annotations

from typing import Any

import torch

from distbelief.errors import JobError
from distbelief.job import Job
from distbelief.shards import Schedule
from distbelief.strategies.base import BeginFrom, Fetch, Seat, nothing_saved
from distbelief.strategies.dataparallel.prepared import PreparedAllReduce
from distbelief.strategies.dataparallel.replica import DataParallelReplica
from distbelief.strategies.flatmodel.compute import ShardComputer
from signsgd.strategy import SignSGD


class VotingComputer(ShardComputer):
    """A shard's gradients become votes as soon as a tile of them is complete, before they are added to others."""

    def begin(self, batch, samples, seed, slot, committed, tile_ready, loss_known=None):
        tiles = [slot.tensor(tile.dtype, tile.offset_bytes, tile.numel) for tile in self.layout.tiles]

        def voted(tile: int) -> None:
            if tile < self.layout.parameter_tiles:
                tiles[tile].sign_()
            tile_ready(tile)

        return super().begin(batch, samples, seed, slot, committed, voted, loss_known)


class VotingReplica(DataParallelReplica):
    """The sum of the votes is not divided by the number of samples: its sign is what the optimizer gets."""

    def _update(self, step: int, scale: float, units: int, untouched: Any) -> None:
        super()._update(step, 1.0, units, untouched)

    def _reduced(self, tile: int, factor: float = 1.0) -> torch.Tensor:
        total = super()._reduced(tile, factor)
        return total.sign() if tile < self._computer.layout.parameter_tiles else total


class PreparedSignSGD(PreparedAllReduce):
    def __init__(self, job: Job, schedule: Schedule, device: torch.device) -> None:
        super().__init__(job, schedule, device, exact=True)
        self._computer = VotingComputer(job, self.model, self._layout, device)

    def build(self, seat: Seat, exchange: Any, fetch: Fetch, begin_from: BeginFrom = nothing_saved) -> VotingReplica:
        given = self._computer, self._recipe, self._schedule, seat, exchange, fetch
        return VotingReplica(*given, True, begin_from)


def prepare(strategy: SignSGD, job: Job, schedule: Schedule, device: torch.device) -> PreparedSignSGD:
    if device.type != "cpu" or job.clip_norm is not None:
        raise JobError("signsgd runs on processors, and clips no norm", hint="use --device cpu, and no clip_norm")
    return PreparedSignSGD(job, schedule, device)
