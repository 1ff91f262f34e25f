"""Parts of real tables, without processes: row gradients are made up, but depend on the values that they are for."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from distbelief.coordinator.rules.servers.roles import Slice
from distbelief.job import Job
from distbelief.shards import Schedule
from distbelief.strategies.ps.protocol.messages import ApplyStep
from distbelief.strategies.ps.server.stores import Change
from distbelief.strategies.ps.tables.messages import ShardRowGradients, UpdateRowGradients
from distbelief.strategies.ps.tables.payloads import payloads_by_part
from distbelief.strategies.ps.tables.rowbuckets import part_of
from distbelief.strategies.ps.tables.slices import AsynchronousTableSlice, SynchronousTableSlice
from distbelief.strategies.ps.tables.specs import specs_of
from distbelief.strategies.tables.embedding import EmbeddingTable, on_servers
from distbelief.strategies.tables.rowgradients import RowGradients
from distbelief.transport.exchange import ROW

SHARDS = 5
PARTS = 4
SAMPLES, BATCH = 42, 10  # the last batch of an epoch fills two shards of five


class Model(nn.Module):
    def __init__(self, init: Any) -> None:
        super().__init__()
        self.users = EmbeddingTable(1_000_000, 3, init=init)
        self.items = EmbeddingTable(40, 2, init="zeros")


class Kit:
    """The job as a server has loaded it."""

    def __init__(
        self,
        clip_norm: float | None = 0.7,
        model: Callable[[], nn.Module] = lambda: Model(("normal", 0.5)),
        optimizer: Any = lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
        schedule: Callable[[int], float] | None = lambda step: 1.0 / (1 + step),
    ) -> None:
        self.job = Job(
            model=model,
            loss=F.mse_loss,
            optimizer=optimizer,
            data=(torch.zeros(SAMPLES, 1), torch.zeros(SAMPLES, 1)),
            global_batch=BATCH,
            shards=SHARDS,
            steps=100,
            clip_norm=clip_norm,
            schedule=schedule,
        )
        self.schedule = Schedule(SAMPLES, BATCH, SHARDS)
        torch.manual_seed(3)
        with on_servers():
            self.specs = specs_of(model(), self.job)
        self.shapes = [Slice(number, 1000) for number in range(PARTS)]

    def store(self) -> SynchronousTableSlice:
        return SynchronousTableSlice(self.specs, self.job, self.schedule)

    def free(self) -> AsynchronousTableSlice:
        return AsynchronousTableSlice(self.specs, self.job)

    # --- a worker's part ---------------------------------------------------------------------------------------------

    def wanted(self, step: int, shard: int) -> list[np.ndarray]:
        """The rows that a shard of a step looks up, by table; some are in several shards, some shards have none."""
        chance = np.random.default_rng([step, shard])
        users = np.unique(chance.integers(0, 30, 12) * 33_331) if shard != 1 else np.zeros(0, np.int64)
        return [users, np.unique(chance.integers(0, 40, 8))]

    def found_out(self, step: int, shard: int, values: list[np.ndarray]) -> list[RowGradients]:
        """Of a shard: numbers that no other step, shard or value gives."""
        return [
            RowGradients(rows, np.sin(value * (1 + shard) + rows[:, None] + step).astype(np.float32))
            for rows, value in zip(self.wanted(step, shard), values, strict=True)
        ]

    def told(self, step: int, shards: list[int]) -> bytes:
        found = np.zeros((len(shards), ROW))
        for row, shard in enumerate(shards):
            _, first, end = self.schedule.shard(step, shard)
            found[row] = (step + 0.5 * shard, 2.0 * (end - first), 0, end - first)
        return found.tobytes()

    def changes(self, step: int, shards: list[int], found: list[list[RowGradients]]) -> list[Change]:
        """By part."""
        return [
            Change(ShardRowGradients(step, shards, one.counts, self.told(step, shards)), one.content)
            for one in payloads_by_part(found, PARTS)
        ]

    def update(self, number: int, step: int, found: list[RowGradients]) -> list[Change]:
        return [
            Change(UpdateRowGradients(number, step, [count for (count,) in one.counts]), one.content)
            for one in payloads_by_part([found], PARTS)
        ]

    def pulled(
        self, stores: list[SynchronousTableSlice] | list[AsynchronousTableSlice], wanted: list[np.ndarray]
    ) -> list[np.ndarray]:
        values = []
        for table, rows in enumerate(wanted):
            value = np.zeros((len(rows), self.specs[table].form.width), np.float32)
            parts = part_of(rows, PARTS)
            for part in range(PARTS):
                mine = np.flatnonzero(parts == part)
                value[mine] = stores[part].tables[table].pull(torch.from_numpy(rows[mine])).numpy()
            values.append(value)
        return values

    def factor(self, squares: list[list[float]]) -> float:
        norm = math.sqrt(math.fsum(one for some in squares for one in some))
        return min(1.0, self.job.clip_norm / (norm + 1e-6)) if self.job.clip_norm else 1.0

    def history(self, steps: int) -> list[list[bytes]]:
        """The contents of every part after 0, 1, 2… steps, in one process to which nothing happens."""
        return [self.contents(stores) for stores in self.stages(steps)]

    @lru_cache(maxsize=4)  # noqa: B019
    def stages(self, steps: int) -> list[list[SynchronousTableSlice]]:
        """Every part, after 0, 1, 2… steps."""
        stores = [self.store() for _ in range(PARTS)]
        found = [[self._copy(store) for store in stores]]
        for step in range(steps):
            shards = list(range(self.schedule.occupied(step)))
            all_found = [self.found_out(step, s, self.pulled(stores, self.wanted(step, s))) for s in shards]
            for store, change in zip(stores, self.changes(step, shards, all_found), strict=True):
                store.apply(change)
            factor = self.factor([store._measured[1] for store in stores])
            for store in stores:
                store.apply(Change(ApplyStep(step, factor)))
            found.append([self._copy(store) for store in stores])
        return found

    def _copy(self, store: SynchronousTableSlice) -> SynchronousTableSlice:
        copy = self.store()
        copy.load(store.state())
        return copy

    def contents(self, stores: list[SynchronousTableSlice] | list[AsynchronousTableSlice]) -> list[bytes]:
        return [bytes(store.contents().numpy()) for store in stores]


def counting() -> Kit:
    """Rows begin at 0, and each gradient of one takes 1 away."""
    return Kit(None, lambda: Model("zeros"), lambda parameters: torch.optim.SGD(parameters, lr=1.0), None)
