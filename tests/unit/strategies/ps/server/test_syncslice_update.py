"""What slices do with the sums of real shards is what allreduce does, bit for bit."""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from torch import nn

from distbelief.data.sources import as_source
from distbelief.job import Job
from distbelief.shards import Schedule, shard_seed
from distbelief.strategies.base import nothing_saved
from distbelief.strategies.dataparallel.committed import CommittedModel
from distbelief.strategies.ps.protocol.messages import VALUES_AT, ApplyStep, PartialSum
from distbelief.strategies.ps.server.slicememory import SliceMemory
from distbelief.strategies.ps.server.syncslice import Change, SynchronousSlice
from distbelief.strategies.ps.strategy import ParameterServer
from distbelief.strategies.ps.worker.prepared import PreparedParameterServer
from distbelief.transport.exchange import ROW
from distbelief.transport.shm.segment import Segment
from distbelief.worker.feed import Feed
from tests.support.replicas.alone import Alone, job_of, kept, linear_data

STEPS = 4


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 700), nn.BatchNorm1d(700), nn.ReLU(), nn.Linear(700, 4))


def stores_of(prepared: PreparedParameterServer, job: Job, schedule: Schedule) -> list[SynchronousSlice]:
    state, found = prepared.first_state(nothing_saved), []
    for shape in prepared.slices():
        memory = SliceMemory(
            shape, prepared.layout, prepared.recipe, job, Segment.private(VALUES_AT + shape.value_bytes)
        )
        store = SynchronousSlice(memory, job, schedule, lambda name: Segment.private(0))
        content, at = Segment.private(shape.size_bytes), 0
        for tile, size in zip(shape.tiles, shape.state_bytes, strict=True):
            state.copy_tile(tile, content, at)
            at += prepared.layout.tiles[tile].size_bytes + size
        store.begin(content.tensor(torch.uint8, 0, shape.size_bytes), 0, state.integers(0))
        found.append(store)
    return found


def served(job: Job) -> str:
    """The weights after some steps: shards are computed one by one, and reach each slice in an order of its own."""
    source = as_source(job.data)
    schedule = Schedule(len(source), job.global_batch, job.resolved_shards)
    feed = Feed(source, schedule, job, shuffle=False)
    prepared = PreparedParameterServer(job, schedule, torch.device("cpu"), ParameterServer())
    stores, layout, computer = stores_of(prepared, job, schedule), prepared.layout, prepared._computer
    values = Segment.private(layout.size_bytes)
    computer.bind_parameters(values, 0)
    buffers = computer.committed_buffers(values, 0)
    chance = random.Random(4)

    def fetch_values() -> None:
        for store in stores:
            shape = store.memory.shape
            values.view(shape.first_byte, shape.value_bytes)[:] = store.memory.value_view()
        computer.commit_integers(stores[0].integers or None)

    for step in range(STEPS):
        fetch_values()
        changes = []
        for shard in range(schedule.occupied(step)):
            slot = Segment.private(layout.size_bytes)
            batch, samples = feed.fetch(step, shard, shard + 1)
            result = computer.run(batch, samples, shard_seed(job.seed, step, shard), slot, buffers, lambda tile: None)
            rows = np.zeros((1, ROW))
            rows[0] = (result.loss_sum, result.weight, result.integers, samples)
            integers = computer.integer_bytes() if shard == 0 else b""
            changes.append(
                (PartialSum(step, shard, shard + 1, rows.tobytes(), result.touched.tobytes(), integers), slot)
            )
        for store in stores:
            shape = store.memory.shape
            for node, slot in chance.sample(changes, len(changes)):
                store.apply(Change(node, slot.view(shape.first_byte, shape.value_bytes)))
        norm = math.sqrt(math.fsum(one for store in stores for one in store.measured[1]))
        factor = min(1.0, job.clip_norm / (norm + 1e-6)) if job.clip_norm else 1.0
        for store in stores:
            store.apply(Change(ApplyStep(step, factor)))
        assert {store.version for store in stores} == {step + 1}
    fetch_values()
    return CommittedModel(computer, buffers).sha256()


def test_the_weights_of_allreduce() -> None:
    for clip_norm, optimizer in ((None, torch.optim.Adam), (0.05, torch.optim.SGD)):
        job = job_of(
            model,
            linear_data(22),
            optimizer=lambda p, make=optimizer: make(p, lr=0.1),
            global_batch=8,
            shards=4,
            steps=STEPS,
            clip_norm=clip_norm,
            schedule=lambda step: 1 / (step + 1),
        )
        with kept() as segments:
            alone = Alone(job, segments)
            for step in range(STEPS):
                alone.step(step)
            assert served(job) == alone.replica.weights_sha256()
