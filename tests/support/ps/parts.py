"""Real slices of a small job, without processes; gradients are made up, but depend on the values that they are for."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from distbelief.job import Job
from distbelief.shards import Range, Schedule, split
from distbelief.strategies.base import nothing_saved
from distbelief.strategies.ps.protocol.messages import VALUES_AT, ApplyStep, PartialSum
from distbelief.strategies.ps.server.slicememory import SliceMemory
from distbelief.strategies.ps.server.syncslice import Change, SumMemory, SynchronousSlice
from distbelief.strategies.ps.strategy import ParameterServer
from distbelief.strategies.ps.worker.prepared import PreparedParameterServer
from distbelief.transport.exchange import ROW
from distbelief.transport.shm.segment import Segment

SHARDS = 5
SAMPLES, BATCH = 42, 10  # the last batch of an epoch fills two shards of five


def made_job(clip_norm: float | None = 0.7) -> Job:
    return Job(
        model=lambda: nn.Sequential(nn.Linear(60, 200), nn.BatchNorm1d(200), nn.Linear(200, 4)),
        loss=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        data=(torch.zeros(SAMPLES, 60), torch.zeros(SAMPLES, 4)),
        global_batch=BATCH,
        shards=SHARDS,
        steps=100,
        clip_norm=clip_norm,
    )


def no_memory(name: str) -> Segment:
    raise AssertionError(f"nobody may open {name} here")


class Kit:
    """The job as a server has loaded it."""

    def __init__(self, clip_norm: float | None = 0.7) -> None:
        self.job = made_job(clip_norm)
        self.schedule = Schedule(SAMPLES, BATCH, SHARDS)
        self.prepared = PreparedParameterServer(self.job, self.schedule, torch.device("cpu"), ParameterServer())
        self.shapes = self.prepared.slices()
        self.layout = self.prepared.layout
        self._space = SumMemory(max(shape.value_bytes for shape in self.shapes))
        self._first = self.prepared.first_state(nothing_saved)

    def store(
        self, number: int, first: bool = True, opened: Callable[[str], Segment] = no_memory,
        values: Segment | None = None,
    ) -> SynchronousSlice:  # fmt: skip
        """`values`: where they are to be, if not in memory that nobody has had before."""
        shape = self.shapes[number]
        values = values or Segment.private(VALUES_AT + shape.value_bytes)
        memory = SliceMemory(shape, self.layout, self.prepared.recipe, self.job, values)
        store = SynchronousSlice(memory, self.job, self.schedule, opened, space=self._space)
        if first:
            content, at = Segment.private(shape.size_bytes), 0
            for tile, size in zip(shape.tiles, shape.state_bytes, strict=True):
                self._first.copy_tile(tile, content, at)
                at += self.layout.tiles[tile].size_bytes + size
            store.begin(content.tensor(torch.uint8, 0, shape.size_bytes), 0, b"")
        return store

    # --- a worker's part ---------------------------------------------------------------------------------------------

    @lru_cache(maxsize=256)  # noqa: B019
    def shard(self, values: bytes, step: int, shard: int) -> np.ndarray:
        """What a shard adds to the sums: numbers that no other step, shard or value gives."""
        floats = np.frombuffer(values, np.float32)
        wave = np.sin(floats * (1 + shard) + 0.01 * np.arange(len(floats)) + step)
        return np.where(np.isfinite(wave), wave, 0).astype(np.float32)

    def total(self, values: bytes, step: int, node: Range) -> np.ndarray:
        """In the order of the tree."""
        if node[1] - node[0] == 1:
            return self.shard(values, step, node[0])
        left, right = split(node)
        if right[0] >= self.schedule.occupied(step):
            return self.total(values, step, left)
        return self.total(values, step, left) + self.total(values, step, right)

    def rows(self, step: int, node: Range) -> bytes:
        found = np.zeros((node[1] - node[0], ROW))
        for row, shard in enumerate(range(*node)):
            samples = self.schedule.shard(step, shard)
            count = samples[2] - samples[1]
            if count:
                found[row] = (step + 0.5 * shard, 2.0 * count, 0, count)
        return found.tobytes()

    def node(self, step: int, node: Range, segment: str = "") -> PartialSum:
        touched = np.ones(len(self.layout.entries), np.uint8).tobytes()
        integers = b"after %d" % step if node[0] == 0 else b""
        return PartialSum(step, *node, self.rows(step, node), touched, integers, segment)

    def change(self, number: int, values: bytes, step: int, node: Range) -> Change:
        shape = self.shapes[number]
        whole = self.total(values, step, node).tobytes()
        return Change(self.node(step, node), bytearray(whole[shape.first_byte : shape.end_byte]))

    def values(self, stores: list[SynchronousSlice]) -> bytes:
        """All slices together, as the layout has them."""
        whole = bytearray(self.layout.size_bytes)
        for shape, store in zip(self.shapes, stores, strict=True):
            whole[shape.first_byte : shape.end_byte] = bytes(store.memory.value_view())
        return bytes(whole)

    def factor(self, squares: list[list[float]]) -> float:
        norm = math.sqrt(math.fsum(one for some in squares for one in some))
        return min(1.0, self.job.clip_norm / (norm + 1e-6)) if self.job.clip_norm else 1.0

    @lru_cache(maxsize=4)  # noqa: B019
    def history(self, steps: int) -> list[bytes]:
        """The values after 0, 1, 2… steps, in one process to which nothing happens."""
        stores = [self.store(number) for number in range(len(self.shapes))]
        found = [self.values(stores)]
        for step in range(steps):
            for number, store in enumerate(stores):
                store.apply(self.change(number, found[-1], step, (0, SHARDS)))
            factor = self.factor([store.measured[1] for store in stores])
            for store in stores:
                store.apply(Change(ApplyStep(step, factor)))
            found.append(self.values(stores))
        return found
