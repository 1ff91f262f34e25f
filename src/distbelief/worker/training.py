"""One generation's work: steps, evaluations at committed steps, and the end of the run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distbelief.checkpoint.weights import save_weights, weights_sha256
from distbelief.comm.messages import Evaluation, StepReport, Timing, WorkerFinished
from distbelief.job import Job
from distbelief.strategies.base import Replica
from distbelief.worker.evaluate import Evaluator
from distbelief.worker.feed import Feed
from distbelief.worker.link import Progress


class Stopwatch:
    """Times the feed, and remembers which shard is being worked on (for the report of a failure)."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.data_s = 0.0
        self.shards = 0
        self.step = -1
        self.shard = -1

    def fetch(self, step: int, first: int, end: int) -> tuple[Any, int]:
        self.step, self.shard = step, first
        started = time.perf_counter()
        batch = self._feed.fetch(step, first, end)
        self.data_s += time.perf_counter() - started
        self.shards += end - first
        return batch


@dataclass(frozen=True)
class Assignment:
    worker: int
    generation: int
    steps: int
    run_dir: Path


def train(
    job: Job, replica: Replica, evaluator: Evaluator | None, watch: Stopwatch, progress: Progress, task: Assignment
) -> WorkerFinished:
    """Run the steps that are left, and return what is to be reported at the end."""
    leads = replica.exchange.rank == 0
    trained_s, samples, loss, busy_s = 0.0, 0, 0.0, 0.0
    metrics: dict[str, float] = {}
    first = replica.steps_applied()
    for step in range(first, task.steps):
        started = time.perf_counter()
        replica.compute(step)
        result = replica.commit(step)
        took = time.perf_counter() - started
        loss = result.loss
        busy_s += took
        if step > first or task.steps == first + 1:  # the first step warms up
            trained_s += took
            samples += result.samples
        progress.step = step + 1
        compute_s = busy_s - watch.data_s - replica.comm_s
        progress.timing = Timing(watch.data_s, compute_s, replica.comm_s, watch.shards)
        if leads:
            report = StepReport(step, result.loss, result.samples, result.fingerprint, time.time())
            progress.reports.append(report)
        if leads and step + 1 == task.steps:  # before the last evaluation, which may fail
            replica.synchronise()
            save_weights(replica.model, task.run_dir / "weights.safetensors")
        if evaluator and (step + 1 == task.steps or (job.evaluate_every and (step + 1) % job.evaluate_every == 0)):
            metrics = evaluator.evaluate(replica)
            if leads:
                progress.evaluations.append(Evaluation(step + 1, metrics))
    if not leads and replica.exchange.shares_state:
        return WorkerFinished(task.worker, task.generation, task.steps)
    replica.synchronise()
    if not leads:  # it has a replica of its own, which must be the same as all others
        digest = weights_sha256(replica.model)
        return WorkerFinished(task.worker, task.generation, task.steps, weights_sha256=digest)
    return WorkerFinished(
        task.worker,
        task.generation,
        task.steps,
        weights_sha256=weights_sha256(replica.model),
        loss=loss,
        metrics=metrics,
        samples_per_s=samples / trained_s if trained_s else 0.0,
    )
