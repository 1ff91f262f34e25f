"""The model of `sandblaster` on a worker or server: made, checked, laid out, and cut into slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from distbelief.checkpoint.sources import MODEL
from distbelief.errors import DistBeliefError, JobError
from distbelief.job import Job
from distbelief.shards import Range, Schedule
from distbelief.strategies.base import BeginFrom, Fetch, Saved, Seat, nothing_saved
from distbelief.strategies.dataparallel.agreement import agree_on_state
from distbelief.strategies.dataparallel.prepared import PreparedModel
from distbelief.strategies.flatmodel.compute import Rehearsal, ShardComputer
from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.flatmodel.state import ReplicaState
from distbelief.strategies.ps.rules.slicing import SliceShape, cut
from distbelief.strategies.ps.worker.exchange import ServerExchange, UsesServers
from distbelief.strategies.sandblaster.evaluation import require_steady
from distbelief.strategies.sandblaster.member import SearchingMember
from distbelief.strategies.sandblaster.messages import MESSAGES
from distbelief.strategies.sandblaster.rules.lbfgs import Settings
from distbelief.strategies.sandblaster.rules.portions import levels
from distbelief.strategies.sandblaster.strategy import Sandblaster
from distbelief.transport.exchange import Geometry
from distbelief.transport.singlemember import SingleMemberExchange

VECTORS_BESIDES = 6  # two points, three gradients, the sum of one


class PreparedSandblaster(UsesServers, PreparedModel):
    """See `Prepared`."""

    messages = MESSAGES

    def __init__(self, job: Job, schedule: Schedule, device: torch.device, settings: Settings) -> None:
        # L-BFGS replaces the job's own optimizer.
        super().__init__(replace(job, optimizer=_none, schedule=None, clip_norm=None), schedule, device)
        self._settings = settings
        types = {tile.dtype for tile in self._layout.tiles[: self._layout.parameter_tiles]}
        if len(types) > 1:
            raise JobError(
                f"sandblaster needs parameters of one type, and the model has {', '.join(sorted(map(str, types)))}",
                hint="make them all float32; precision='bf16' computes in bf16 where that is wanted",
            )
        self._computer = ShardComputer(self._job, self.model, self._layout, device)

    def facts(self) -> dict[str, str]:
        return {**super().facts(), "optimizer": "L-BFGS"}

    def _rehearse(self, batch: Any, samples: int) -> Rehearsal:
        found = super()._rehearse(batch, samples)
        require_steady(self._computer, found.result)
        return found

    @property
    def layout(self) -> Layout:
        return self._layout

    def slices(self) -> list[SliceShape]:
        return cut(self._layout, self._recipe)

    @property
    def slice_sizes(self) -> list[int]:
        """The bytes that each slice takes on a server when the history is full."""
        return [shape.value_bytes * (2 * self._settings.history_size + VECTORS_BESIDES) for shape in self.slices()]

    def least_bytes(self) -> int:
        """The memory of a worker: the values, and a partial sum per level of the tree of portions."""
        return self._layout.size_bytes * (1 + levels(self._schedule.shards))

    def groups(self, mine: Range) -> list[list[Range]]:
        return []  # workers are given portions one by one: nothing can be fetched ahead

    def geometry(self, ranges: Sequence[Range]) -> Geometry:
        return Geometry(
            tiles=self._layout.tiles,
            slot_bytes=self._layout.size_bytes,
            slots=[levels(self._schedule.shards)] * len(ranges),
            shards=self._schedule.shards,
            marks=len(self._layout.entries),
            integer_bytes=len(self._computer.integer_bytes()),
        )

    def first_state(self, begin_from: BeginFrom) -> ReplicaState:
        """The values that the servers begin with, in private memory."""

        def weights(step: int = -1) -> Saved | None:
            saved = begin_from(step)
            if saved is None:
                return None
            tensors = {name: saved.tensors[name] for name in saved.tensors if name.startswith(MODEL)}
            return replace(saved, tensors=tensors)

        alone = SingleMemberExchange(replace(self.geometry([(0, self._schedule.shards)]), slots=[0]))
        state = ReplicaState(self._layout, self._recipe, alone, len(self._computer.integer_bytes()))
        agree_on_state(state, alone, self._computer, self._recipe, weights)
        return state

    def build(self, seat: Seat, exchange: Any, fetch: Fetch, begin_from: BeginFrom = nothing_saved) -> SearchingMember:
        if not isinstance(exchange, ServerExchange):
            raise DistBeliefError("sandblaster needs servers: its steps cannot be computed by one process alone")
        return SearchingMember(self._computer, self._recipe, self._schedule, seat, exchange, fetch, self._settings)


def _none(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def prepare(strategy: Sandblaster, job: Job, schedule: Schedule, device: torch.device) -> PreparedSandblaster:
    settings = Settings(history_size=strategy.history, lr=strategy.lr)
    return PreparedSandblaster(job, schedule, device, settings)
