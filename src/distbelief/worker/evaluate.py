"""Evaluation: the shards of the validation data with another function applied, at a committed step."""

from __future__ import annotations

import safetensors.torch
import torch

from distbelief.comm.exchange import Exchange
from distbelief.data.seeding import seed_everything
from distbelief.data.sources import InMemory, MapStyle, split_batch
from distbelief.job import Job
from distbelief.shards import Schedule, shard_seed
from distbelief.strategies.base import Replica
from distbelief.strategies.compute import loss_sum, move
from distbelief.worker.feed import Feed
from distbelief.worker.metrics import ShardMetrics

SMALLEST_BATCH = 256  # samples per evaluation shard; larger than in training, because nothing is kept for backward


class Evaluator:
    """Measures loss and metrics over the validation data, on all members together."""

    def __init__(self, job: Job, source: InMemory | MapStyle, device: torch.device) -> None:
        size = max(job.global_batch, SMALLEST_BATCH)
        self._schedule = Schedule(samples=len(source), global_batch=size, shards=1)
        self.shards = self._schedule.steps_per_epoch
        self._feed = Feed(source, self._schedule, job, shuffle=False)
        self._job = job
        self._device = device
        self._metrics = ShardMetrics(job.metrics)

    def rehearse(self, model: torch.nn.Module) -> None:
        """Measure one shard and forget it: a metric that fails does so before the training, not after it."""
        model.eval()
        with torch.no_grad():
            self._metrics.combine(1, self._measure(model, 0))
        model.train()

    def evaluate(self, replica: Replica) -> dict[str, float]:
        """Every member computes its part; all return the same values."""
        exchange: Exchange = replica.exchange
        first = exchange.rank * self.shards // exchange.size
        end = (exchange.rank + 1) * self.shards // exchange.size
        self._feed.expect([(0, 1)], until=end)
        replica.synchronise()
        replica.model.eval()
        measured: dict[str, torch.Tensor] = {}
        try:
            with torch.no_grad():
                for shard in range(first, end):
                    measured.update(self._measure(replica.model, shard))
        finally:
            replica.model.train()
        everything: dict[str, torch.Tensor] = {}
        for payload in exchange.gather(safetensors.torch.save(measured)):
            everything.update(safetensors.torch.load(payload))
        return self._metrics.combine(self.shards, everything)

    def _measure(self, model: torch.nn.Module, shard: int) -> dict[str, torch.Tensor]:
        batch, samples = self._feed.fetch(shard, 0, 1)
        seed_everything(shard_seed(self._job.seed, -1, shard))
        args, kwargs, target = split_batch(move(batch, self._device))
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._job.precision == "bf16"):
            output = model(*args, **kwargs)
            total, weight = loss_sum(self._job.loss(output, target), samples)
        return self._metrics.measure(shard, output, target, (float(total), weight))

    def close(self) -> None:
        self._feed.close()
