"""A member that is alone in its generation, in the test's own process, with a real segments and real shared memory; and
single shards of a job, computed one by one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn, optim
from torch.nn import functional as F

from distbelief.data.sources import as_source
from distbelief.job import Job
from distbelief.shards import Schedule, shard_seed
from distbelief.strategies.base import Replica, Seat
from distbelief.strategies.dataparallel.prepared import PreparedAllReduce
from distbelief.strategies.flatmodel.compute import ShardComputer, ShardResult, make_model
from distbelief.strategies.flatmodel.layout import lay_out
from distbelief.transport.abort import Abort
from distbelief.transport.exchange import Geometry
from distbelief.transport.shm.exchange import SharedExchange
from distbelief.transport.shm.segment import Segment, SegmentClient
from distbelief.transport.shm.segmentserver import SegmentServer
from distbelief.worker.feed import Feed


@contextmanager
def kept() -> Iterator[SegmentClient]:
    """A client of a segment server that runs in a thread."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    segments = SegmentServer()

    def serve() -> None:
        try:
            while True:
                segments.answer(ours)
        except EOFError:
            ours.close()

    server = threading.Thread(target=serve)
    server.start()
    try:
        yield SegmentClient(theirs)
    finally:
        theirs.close()
        server.join()
        segments.close()


def exchange(client: SegmentClient, generation: int, geometry: Geometry, rank: int = 0) -> SharedExchange:
    return SharedExchange(client, f"generation {generation}", rank, geometry, Abort())


def job_of(
    model: Callable[[], nn.Module],
    data: Any,
    loss: Callable[[Any, Any], Any] = F.mse_loss,
    optimizer: Callable[[list[nn.Parameter]], optim.Optimizer] = lambda p: optim.SGD(p, lr=0.1),
    **options: Any,
) -> Job:
    return Job(model=model, loss=loss, optimizer=optimizer, data=data, **{"steps": 3, "shuffle": False, **options})


class Alone:
    """A replica that has all shards, in this process."""

    def __init__(self, job: Job, segments: Any) -> None:
        source = as_source(job.data)
        self.schedule = Schedule(len(source), job.global_batch, job.resolved_shards)
        feed = Feed(source, self.schedule, job, shuffle=job.shuffle)
        self.prepared = PreparedAllReduce(job, self.schedule, torch.device("cpu"), exact=True)
        ranges = [(0, self.schedule.shards)]
        self.geometry = self.prepared.geometry(ranges)
        self.exchange = exchange(segments, 1, self.geometry)
        self.replica: Replica = self.prepared.build(Seat(0, ranges, 1000), self.exchange, feed.fetch)
        self.model = self.prepared.model

    def slots(self) -> list[bytes]:
        size = self.geometry.slot_bytes
        return [bytes(self.exchange.slot(i).view(0, size)) for i in range(self.geometry.slots[0])]

    def step(self, number: int) -> float:
        self.replica.compute(number)
        loss = self.replica.commit(number).loss
        self.replica.synchronise()
        return loss


class Computed:
    """Single shards of a job, each into a slot of its own."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model = make_model(job, torch.device("cpu"))
        self.layout = lay_out(self.model)
        self.computer = ShardComputer(job, self.model, self.layout, torch.device("cpu"))
        self.source = as_source(job.data)
        self.schedule = Schedule(len(self.source), job.global_batch, job.resolved_shards)
        start = Segment.private(self.layout.size_bytes)
        self.computer.write_values(start, 0)
        self.committed = self.computer.committed_buffers(start, 0)

    def shard(self, step: int, shard: int) -> tuple[bytes, ShardResult]:
        """(the slot's bytes, the result)"""
        _, low, high = self.schedule.shard(step, shard)
        slot = Segment.private(self.layout.size_bytes)
        seed = shard_seed(self.job.seed, step, shard)
        batch = self.source.fetch(np.arange(low, high))
        result = self.computer.run(batch, high - low, seed, slot, self.committed, lambda tile: None)
        return bytes(slot.view(0, self.layout.size_bytes)), result


def linear_data(samples: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(samples, 6, generator=generator), torch.randn(samples, 4, generator=generator)
