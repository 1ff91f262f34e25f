"""One process that has all replicas of `local_sgd`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from distbelief.checkpoint.manifest import Facts
from distbelief.checkpoint.saving import seal, write_part
from distbelief.data.sources import as_source
from distbelief.job import Job
from distbelief.shards import Schedule
from distbelief.strategies.base import BeginFrom, Saved, Seat, StepResult, nothing_saved
from distbelief.strategies.localsgd.strategy import LocalSGD
from distbelief.transport.exchange import Geometry
from distbelief.transport.shm.segment import Segment
from distbelief.transport.singlemember import SingleMemberExchange
from distbelief.worker.feed import Feed
from distbelief.worker.origin import facts_at, saved_at
from tests.support.replicas.states import job_with

STEPS = 8  # 40 samples in batches of 12: every fourth batch has 4 samples, for the first replica only


_folders = itertools.count()


def job_of(optimizer: str = "AdamW", **options: Any) -> Job:
    return job_with(optimizer, **{"global_batch": 12, "shards": 6, "steps": STEPS, **options})


class Trainer:
    """One process that has all replicas, and begins where it is told to."""

    def __init__(
        self,
        job: Job,
        how: LocalSGD,
        begin_from: BeginFrom = nothing_saved,
        exchange: Callable[[Geometry], SingleMemberExchange] = SingleMemberExchange,
        generation: int = 0,
    ) -> None:
        source = as_source(job.data)
        schedule = Schedule(len(source), job.global_batch, job.resolved_shards)
        feed = Feed(source, schedule, job, shuffle=True)
        prepared = how.prepare(job, schedule, torch.device("cpu"))
        ranges = [(0, prepared.shards)]
        feed.expect_groups(prepared.groups(ranges[0]), STEPS, how.stride)
        self.exchange = exchange(prepared.geometry(ranges))
        seat = Seat(0, ranges, STEPS, generation)
        self.replica = prepared.build(seat, self.exchange, feed.fetch, begin_from)
        self.model = prepared.model

    def train(self, until: int = STEPS) -> list[StepResult]:
        found: list[StepResult] = []
        while (step := self.replica.steps_applied()) < until:
            self.replica.compute(step)
            last = self.replica.commit(step)
            found += [*last.before, last]
        self.replica.synchronise()
        return found

    def saved(self) -> Saved:
        """Its present state, by way of a checkpoint's file."""
        folder, step = f"memory://local/{next(_folders)}", self.replica.steps_applied()
        portion = self.replica.portions()[0]
        copy = Segment.private(portion.size_bytes)
        copying = self.replica.copy_portion(step, copy)
        copying.finish()
        record = write_part(folder, step, 1, 1, portion.slices(copy, copying.outside))
        seal(folder, step, facts_at(Facts(), self.replica, step), [record])
        return saved_at(folder, step)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    differ = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
    assert not differ, differ
