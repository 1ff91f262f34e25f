"""Checks a job as a worker does before it trains: with real readers and a real shard computer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from distbelief.data.sources import as_source
from distbelief.job import Job
from distbelief.strategies import parse
from distbelief.strategies.purity import Impurity
from distbelief.worker.feed import Feed
from distbelief.worker.loading import checked_canary

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()


def job_of(model: Callable[[], nn.Module], **options: Any) -> Job:
    defaults = {"loss": F.cross_entropy, "data": (X, Y), "global_batch": 16, "steps": 3}
    return Job(model=model, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **{**defaults, **options})


def check(job: Job, strategy: str = "allreduce") -> list[Impurity]:
    how = parse(strategy)
    source = as_source(job.data, job.collate)
    schedule = how.schedule_of(job, len(source))
    feed = Feed(source, schedule, job, shuffle=job.shuffle)
    try:
        prepared = how.prepare(job, schedule, torch.device("cpu"))
        values = {name: one.detach().clone() for name, one in prepared.model.named_parameters() if not one.is_meta}
        found = list(checked_canary(how, prepared, feed, feed.fetch).impurities)
        if not found:
            now = dict(prepared.model.named_parameters())
            assert all(torch.equal(now[name], one) for name, one in values.items()), "the check leaves no trace"
        return found
    finally:
        feed.close()
