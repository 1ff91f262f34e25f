"""Evaluation of a committed step: the validation data is divided into shards, as in training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import safetensors.torch
import torch

from distbelief.data.readers import ReaderError
from distbelief.data.sources import InMemory, MapStyle, seed_everything, split_batch
from distbelief.job import Job
from distbelief.shards import Schedule, shard_seed
from distbelief.strategies.base import MeasureAll, Seated, Task
from distbelief.strategies.flatmodel.compute import loss_sum, move
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
        self._metrics = ShardMetrics(job.metrics, device)

    def rehearse(self, model: torch.nn.Module) -> None:
        """Measure one shard and discard the result, so that a broken metric fails before training begins."""
        task = self._tasks()[0]
        args, kwargs, target = split_batch(move(task.fetch()[0], self._device))
        model.eval()
        with torch.no_grad(), self._autocast():
            seed_everything(task.seed)
            output = model(*args, **kwargs)
            self._metrics.combine(1, self._measure(task, output, target))
        model.train()

    def evaluate(self, replica: Seated) -> dict[str, float]:
        """Every member computes its part; all return the same values."""
        return self.evaluate_with(replica.measure, replica.exchange.gather)

    def evaluate_with(self, measure_all: MeasureAll, gather: Callable[[bytes], list[bytes]]) -> dict[str, float]:
        """`measure_all`: forward passes of this member's part of the tasks; `gather`: everybody's bytes."""
        self._feed.expect([(0, 1)], until=self.shards)
        measured: dict[str, torch.Tensor] = {}

        def measure(task: Task, output: Any, target: Any) -> None:
            with torch.no_grad(), self._autocast():
                measured.update(self._measure(task, output, target))

        measure_all(self._tasks(), measure)
        everything: dict[str, torch.Tensor] = {}
        for payload in gather(safetensors.torch.save(measured)):
            everything.update(safetensors.torch.load(payload))
        return self._metrics.combine(self.shards, everything)

    def _tasks(self) -> list[Task]:
        found = []
        for shard in range(self.shards):
            _, low, high = self._schedule.shard(shard, 0)
            seed = shard_seed(self._job.seed, -1, shard)
            found.append(Task(shard, high - low, seed, partial(self._fetch, shard)))
        return found

    def _fetch(self, shard: int) -> tuple[Any, int]:
        try:
            return self._feed.fetch(shard, 0, 1)
        except ReaderError as error:
            raise type(error)(f"`validation`: {error.message}", hint=error.hint, details=error.details) from error

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._job.precision == "bf16")

    def _measure(self, task: Task, output: Any, target: Any) -> dict[str, torch.Tensor]:
        total, weight = loss_sum(self._job.loss(output, target), task.samples)
        return self._metrics.measure(task.number, output, target, (float(total), float(weight)))

    def close(self) -> None:
        self._feed.close()
