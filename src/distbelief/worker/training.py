"""One generation's work: steps, evaluations at committed steps, and the end of the run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distbelief.checkpoint.manifest import Facts
from distbelief.control.messages import Evaluation, StepReport, Timing, WorkerFinished
from distbelief.job import Job
from distbelief.strategies.base import Replica, Seated
from distbelief.worker.evaluate import Evaluator
from distbelief.worker.feed import Feed
from distbelief.worker.link import Progress
from distbelief.worker.origin import facts_at
from distbelief.worker.saving import Saver

if TYPE_CHECKING:
    from distbelief.worker.profiling.profiler import Profiler  # it is loaded where a profile is taken


@dataclass
class Speed:
    """What this process has trained, over all generations."""

    seconds: float = 0.0
    samples: int = 0

    def per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0


class Stopwatch:
    """Times the feed, and remembers which shard is being worked on (for the report of a failure)."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.data_s = 0.0
        self.shards = 0
        self.step = -1
        self.shard = -1
        self.speed = Speed()

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
    reported: int
    """The coordinator knows of all steps before this one."""
    sealed: int = 0
    """The newest checkpoint."""
    saver: Saver | None = None
    facts: Facts = field(default_factory=Facts)
    """What checkpoints say of the job."""
    show: Callable[[Sequence[str]], None] = lambda lines: None
    """Tells people how the model is divided."""
    stride: int = 1
    """Steps that are committed together: there is a state after every multiple of it, and after the last step."""
    profile: Profiler | None = None

    def before(self, applied: int) -> int:
        """The state before that one: after how many steps.

        >>> Assignment(0, 1, 20, Path(), 0, stride=8).before(20)
        16
        """
        return (applied - 1) // self.stride * self.stride


def train(
    job: Job, replica: Replica, evaluator: Evaluator | None, watch: Stopwatch, progress: Progress, task: Assignment
) -> WorkerFinished:
    """Run the steps that are left, and return what is to be reported at the end."""
    leads = replica.exchange.rank == 0
    first = replica.steps_applied()
    metrics: dict[str, float] = {}
    if leads:
        progress.recall = lambda reported: report_again(replica, progress, reported)
        # That members went back may not have been heard yet when it was said what is reported: then all of it again.
        progress.recall(task.reported if task.reported <= first else 0)
        metrics = _last_evaluation(replica)[1]
    if (begun := replica.taken_over()) and begun.is_in_part:
        if task.saver:
            task.saver.miss(first)
    else:
        if evaluator and first and _is_due(job, first, task) and _is_missing(replica, first):
            metrics = _evaluate(evaluator, replica, progress, first)
        if first > task.sealed:  # whoever saved it may have died on the way
            _save_if_due(replica, first, task)
    if leads and (lines := replica.plan_lines()):
        task.show(lines)
    busy_s = 0.0
    last = None
    watch.data_s, watch.shards = 0.0, 0
    step = first
    if task.profile:
        task.profile.at(step)
    while step < task.steps:
        started = time.perf_counter()
        replica.compute(step)
        last = replica.commit(step)
        results = [*last.before, last]
        took = time.perf_counter() - started
        busy_s += took
        if step > first or step + len(results) == task.steps:  # the first step warms up
            watch.speed.seconds += took
            watch.speed.samples += sum(result.samples for result in results)
        progress.step = step + len(results)
        compute_s = busy_s - watch.data_s - replica.comm_s
        waits, traffic = dict(replica.waits()), replica.traffic()
        progress.timing = Timing(
            watch.data_s, compute_s, replica.comm_s, watch.shards, waits, *traffic, helped=replica.helped()
        )
        if leads:
            at = time.time()
            for number, one in enumerate(results, step):
                report = StepReport(number, one.loss, one.samples, one.fingerprint, at, task.generation)
                progress.reports.append(report)
        if leads and (lines := replica.plan_lines()):
            task.show(lines)
        step += len(results)
        if task.profile:
            task.profile.at(step)
        if step == task.steps:  # before the last evaluation, which may fail
            replica.save_weights(task.run_dir / "weights.safetensors")
        if evaluator and _is_due(job, step, task):
            metrics = _evaluate(evaluator, replica, progress, step)
        _save_if_due(replica, step, task)
    if last is None:  # the steps were done before this generation; whoever led may have died before it had saved
        replica.save_weights(task.run_dir / "weights.safetensors")
    digest = replica.weights_sha256()
    if not leads:  # one that has a replica of its own must have the same as all others
        return WorkerFinished(task.worker, task.generation, task.steps, weights_sha256=digest)
    loss = last.loss if last else replica.remembered(task.steps - 1)[-1].loss
    wire_bytes, plain_bytes = replica.traffic()
    return WorkerFinished(
        task.worker,
        task.generation,
        task.steps,
        weights_sha256=digest,
        loss=loss,
        metrics=metrics,
        samples_per_s=watch.speed.per_s(),
        wire_bytes=wire_bytes,
        plain_bytes=plain_bytes,
    )


def _save_if_due(replica: Replica, applied: int, task: Assignment) -> None:
    if task.saver and task.saver.is_due(applied, task.steps, task.before(applied)):
        facts = facts_at(task.facts, replica, applied)
        task.saver.take(replica, applied, task.generation, facts, last=applied == task.steps)


def _is_due(job: Job, applied: int, task: Assignment) -> bool:
    every = job.evaluate_every
    return applied == task.steps or bool(every and applied // every > task.before(applied) // every)


def _is_missing(replica: Replica, applied: int) -> bool:
    """Whether this state is still to be evaluated. Rank 0 decides: one that was aborted may be over on some members."""
    return replica.exchange.gather(b"missing" if replica.note()[0] != applied else b"done")[0] == b"missing"


def _evaluate(evaluator: Evaluator, replica: Replica, progress: Progress, applied: int) -> dict[str, float]:
    metrics = evaluator.evaluate(replica)
    replica.keep_note(json.dumps(metrics).encode())
    if replica.exchange.rank == 0:
        progress.evaluations.append(Evaluation(applied, metrics))
    return metrics


def report_again(replica: Seated, progress: Progress, reported: int) -> None:
    """Report again what may have been lost: with earlier members, or with a coordinator. Any member can."""
    for one in replica.remembered(reported):
        report = StepReport(one.step, one.loss, one.samples, one.fingerprint, one.at, one.generation)
        progress.reports.append(report)
    evaluated, metrics = _last_evaluation(replica)
    if metrics:
        progress.evaluations.append(Evaluation(evaluated, metrics))


def _last_evaluation(replica: Seated) -> tuple[int, dict[str, float]]:
    evaluated, content = replica.note()
    return evaluated, json.loads(content) if content else {}
