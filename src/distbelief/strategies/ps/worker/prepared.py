"""`ps` on a worker or server before it has a seat: the model, its layout and its slices; `build` makes the replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from distbelief.errors import JobError
from distbelief.job import Job
from distbelief.shards import Range, Schedule
from distbelief.strategies.base import BeginFrom, Fetch, Seat, nothing_saved
from distbelief.strategies.dataparallel.agreement import agree_on_state
from distbelief.strategies.dataparallel.prepared import PreparedAllReduce
from distbelief.strategies.dataparallel.replica import DataParallelReplica
from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.flatmodel.state import ReplicaState
from distbelief.strategies.flatmodel.tileoptimizer import Recipe
from distbelief.strategies.ps.protocol.frames import RUN_MESSAGES
from distbelief.strategies.ps.rules.options import ParameterServerOptions
from distbelief.strategies.ps.rules.slicing import SliceShape, cut
from distbelief.strategies.ps.tables.remote import RemoteTables
from distbelief.strategies.ps.tables.rowbuckets import parts_for
from distbelief.strategies.ps.tables.specs import specs_of
from distbelief.strategies.ps.worker.asynchronous import AsynchronousReplica, free_slots
from distbelief.strategies.ps.worker.asynctraining import train_freely
from distbelief.strategies.ps.worker.backupworkers import BackupWorkerReplica
from distbelief.strategies.ps.worker.compressed import (
    CompressedAsynchronousReplica,
    CompressedSynchronousReplica,
    uncompressed_notice,
)
from distbelief.strategies.ps.worker.exchange import ServerExchange, UsesServers
from distbelief.strategies.ps.worker.synchronous import SynchronousReplica
from distbelief.strategies.tables.embedding import on_servers
from distbelief.transport.exchange import Geometry
from distbelief.transport.singlemember import SingleMemberExchange


class PreparedParameterServer(UsesServers, PreparedAllReduce):
    messages = RUN_MESSAGES

    def __init__(self, job: Job, schedule: Schedule, device: torch.device, strategy: ParameterServerOptions) -> None:
        with on_servers():
            super().__init__(job, schedule, device, strategy.in_steps, updates_on=torch.device("cpu"))
        self.strategy = strategy
        self.tables = specs_of(self.model, job)
        if self.tables and strategy.backups:
            raise JobError(
                f"ps:sync:backups does not know the tables of the model ('{self.tables[0].name}')",
                hint="leave backups out",
            )
        self.loop = None if strategy.in_steps else train_freely
        self.table_parts = parts_for(strategy.servers) if self.tables else 0

    @cached_property
    def parameters(self) -> int:
        """Tables count with all their rows."""
        return sum(p.numel() for p in self._computer.parameters) + sum(s.form.rows * s.form.width for s in self.tables)

    def least_bytes(self) -> int:
        """On a device: a slot for gradients, and a copy of the values."""
        return super().least_bytes() if self._device.type == "cpu" else 2 * self._layout.size_bytes

    def groups(self, mine: Range) -> list[list[Range]]:
        """Members that do not do steps together take whole batches."""
        return super().groups(mine if self.strategy.in_steps else (0, self._schedule.shards))

    def geometry(self, ranges: Sequence[Range]) -> Geometry:
        usual = super().geometry(ranges)
        if self.strategy.in_steps:
            return usual
        return replace(usual, slots=[free_slots(self.strategy)] * len(ranges))

    def slices(self) -> list[SliceShape]:
        return cut(self._layout, self._recipe)

    def table_slices(self) -> range:
        """The numbers of the slices of tables, which come after the slices of dense parameters."""
        first = len(self.slices())
        return range(first, first + self.table_parts)

    def integer_numbers(self, content: bytes) -> np.ndarray:
        """The integer buffers as int64."""
        found = []
        for _, buffer in self.model.named_buffers():
            if not buffer.is_floating_point() and buffer.numel():
                size = buffer.numel() * buffer.element_size()
                part, content = bytearray(content[:size]), content[size:]
                found.append(torch.frombuffer(part, dtype=buffer.dtype).to(torch.int64).numpy())
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def recipe(self) -> Recipe:
        return self._recipe

    def first_state(self, begin_from: BeginFrom) -> ReplicaState:
        """The whole first state of the servers, in private memory."""
        alone = SingleMemberExchange(replace(self.geometry([(0, self._schedule.shards)]), slots=[0]))
        state = ReplicaState(self._layout, self._recipe, alone, len(self._computer.integer_bytes()))
        agree_on_state(state, alone, self._computer, self._recipe, begin_from)
        return state

    def build(  # type: ignore[override]
        self, seat: Seat, exchange: Any, fetch: Fetch, begin_from: BeginFrom = nothing_saved
    ) -> SynchronousReplica | AsynchronousReplica | DataParallelReplica:
        """Without servers (one process that repeats a step) the replica is that of allreduce, which gives the same
        bits."""
        if not isinstance(exchange, ServerExchange):
            if self.tables:
                raise JobError(
                    f"the rows of table '{self.tables[0].name}' are on servers: without them no step can be computed",
                    hint="use the run's weights, or train with --strategy allreduce where the tables fit in memory",
                )
            return super().build(seat, exchange, fetch, begin_from)
        tables = RemoteTables(self._computer.tables, self.tables, self.table_slices())
        given = self._computer, self._recipe, self._schedule, seat, exchange, fetch, tables
        if not self.strategy.in_steps:
            if self.strategy.compression:
                return CompressedAsynchronousReplica(*given, self.strategy, begin_from)
            return AsynchronousReplica(*given, self.strategy)
        if self.strategy.backups:
            return BackupWorkerReplica(*given, self.strategy.backups)
        if self.strategy.compression and (self.strategy.always or not exchange.maps):
            return CompressedSynchronousReplica(*given, self.strategy, begin_from)
        replica = SynchronousReplica(*given)
        replica.news += [uncompressed_notice(self.strategy)] if self.strategy.compression else []
        return replica


def prepare(
    strategy: ParameterServerOptions, job: Job, schedule: Schedule, device: torch.device
) -> PreparedParameterServer:
    return PreparedParameterServer(job, schedule, device, strategy)
