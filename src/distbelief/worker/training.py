"""One generation's training: steps, evaluations at committed steps, and the end of the run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distbelief.checkpoint.manifest import Facts
from distbelief.control.messages import Evaluation, Timing, WorkerFinished
from distbelief.job import Job
from distbelief.options import SavePlan
from distbelief.steadyclock import CLOCK
from distbelief.strategies.base import Applied, MeasureAll, Replica, Seated
from distbelief.worker.evaluate import Evaluator
from distbelief.worker.feed import Feed
from distbelief.worker.link import Progress
from distbelief.worker.origin import facts_at
from distbelief.worker.rules.reports import first_to_repeat, report_of
from distbelief.worker.saving import Saver

if TYPE_CHECKING:
    from distbelief.worker.profiling.profiler import Profiler  # imported only when a profile is taken


@dataclass
class Speed:
    """Training time and samples of this process, over all generations."""

    seconds: float = 0.0
    samples: int = 0

    def per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0


class Stopwatch:
    """Times the feed, and remembers the present shard for the report of a failure."""

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
    """The coordinator has reports of all steps before this one."""
    sealed: int = 0
    """The step of the newest checkpoint."""
    saver: Saver | None = None
    facts: Facts = field(default_factory=Facts)
    """Facts about the job that every checkpoint repeats."""
    show: Callable[[Sequence[str]], None] = lambda lines: None
    """Reports how the model is divided."""
    stride: int = 1
    """Steps that are committed together: states exist after every multiple of the stride, and after the last step."""
    profile: Profiler | None = None

    def before(self, applied: int) -> int:
        """The step count of the state that precedes the state after `applied` steps.

        >>> Assignment(0, 1, 20, Path(), 0, stride=8).before(20)
        16
        """
        return (applied - 1) // self.stride * self.stride


@dataclass(frozen=True)
class GenerationTraining:
    """One generation's training on this worker, as training loops see it. Implements `Training`."""

    job: Job
    replica: Seated
    evaluator: Evaluator | None
    watch: Stopwatch
    progress: Progress
    """The link's progress; the next heartbeat carries it."""
    task: Assignment

    @property
    def worker(self) -> int:
        return self.task.worker

    @property
    def generation(self) -> int:
        return self.task.generation

    @property
    def steps(self) -> int:
        return self.task.steps

    @property
    def run_dir(self) -> Path:
        return self.task.run_dir

    @property
    def reported(self) -> int:
        return self.task.reported

    @property
    def evaluates(self) -> bool:
        return self.evaluator is not None

    @property
    def data_s(self) -> float:
        return self.watch.data_s

    @property
    def samples_per_s(self) -> float:
        return self.watch.speed.per_s()

    def begin(self) -> None:
        self.watch.data_s, self.watch.shards = 0.0, 0

    def last_evaluation(self) -> dict[str, float]:
        return _last_evaluation(self.replica)[1]

    def answer_recalls(self) -> None:
        self.progress.recall = lambda reported: report_again(self.replica, self.progress, reported)

    def report(self, one: Applied) -> None:
        self.progress.reports.append(report_of(one))

    def reached(self, applied: int, counted: int) -> None:
        self.progress.step = applied
        if self.task.profile:
            self.task.profile.at(counted)

    def spent(self, compute_s: float, pace: Sequence[int]) -> None:
        watch, replica = self.watch, self.replica
        self.progress.timing = Timing(
            watch.data_s, compute_s, replica.comm_s, watch.shards, {}, *replica.traffic(), pace=list(pace)
        )

    def trained(self, seconds: float, samples: int) -> None:
        self.watch.speed.seconds += seconds
        self.watch.speed.samples += samples

    def show(self, lines: Sequence[str]) -> None:
        self.task.show(lines)

    def evaluate(self, applied: int, alone: MeasureAll | None = None) -> dict[str, float]:
        assert self.evaluator is not None
        fetched, self.watch.shard = self.watch.shard, -1  # a failure is not one of the shard that was fetched ahead
        if alone:
            metrics = self.evaluator.evaluate_with(alone, lambda payload: [payload])
        else:
            metrics = self.evaluator.evaluate(self.replica)
        self.watch.shard = fetched
        self.replica.keep_note(json.dumps(metrics).encode())
        if alone or self.replica.exchange.rank == 0:
            self.progress.evaluations.append(Evaluation(applied, metrics))
        return metrics

    def is_evaluation_due(self, applied: int) -> bool:
        return applied == self.steps or _is_passed(self.job.evaluate_every, applied, self.task.before(applied))

    def save_wished(self) -> int:
        return self.task.saver.wished if self.task.saver else -1

    def is_save_due(self, applied: int) -> bool:
        saver = self.task.saver
        if saver is None:
            return False
        return is_save_due(saver.plan, saver.asked, applied, self.steps, self.task.before(applied))

    def save(self, applied: int, last: bool = False) -> None:
        assert self.task.saver is not None
        facts = facts_at(self.task.facts, self.replica, applied)
        self.task.saver.take(self.replica, applied, self.generation, facts, last=last)

    def save_if_due(self, applied: int) -> None:
        if self.is_save_due(applied):
            self.save(applied, last=applied == self.steps)


def is_save_due(plan: SavePlan, asked: int, applied: int, steps: int, before: int) -> bool:
    """Whether to save the state after `applied` steps: the last state, the state that was asked for, and the first
    state at or after every multiple of `plan.every_steps`.

    `before`: the number of steps of the previous state.

    >>> plan = SavePlan("checkpoints", every_steps=4)
    >>> [applied for applied in range(1, 11) if is_save_due(plan, 7, applied, 10, applied - 1)]
    [4, 7, 8, 10]
    """
    return applied in (steps, asked) or _is_passed(plan.every_steps, applied, before)


def _is_passed(every: int | None, applied: int, before: int) -> bool:
    """Whether a multiple of `every` lies after `before` and not after `applied`. 0 or None: there are no multiples."""
    return bool(every and applied // every > before // every)


def train(replica: Replica, training: GenerationTraining) -> WorkerFinished:
    """Run the remaining steps, and return the final report."""
    watch, progress, task = training.watch, training.progress, training.task
    leads = replica.exchange.rank == 0
    first = replica.steps_applied()
    metrics: dict[str, float] = {}
    if leads:
        training.answer_recalls()
        progress.recall(first_to_repeat(task.reported, first))
        metrics = training.last_evaluation()
    if (begun := replica.taken_over()) and begun.is_in_part:
        if task.saver:
            task.saver.miss(first)
    else:
        if training.evaluates and first and training.is_evaluation_due(first) and _is_missing(replica, first):
            metrics = training.evaluate(first)
        if first > task.sealed:  # the member that saved it may have died before it was sealed
            training.save_if_due(first)
    if leads and (lines := replica.plan_lines()):
        task.show(lines)
    busy_s = 0.0
    last = None
    training.begin()
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
            training.trained(took, sum(result.samples for result in results))
        progress.step = step + len(results)
        compute_s = busy_s - watch.data_s - replica.comm_s
        waits, traffic = dict(replica.waits()), replica.traffic()
        progress.timing = Timing(
            watch.data_s, compute_s, replica.comm_s, watch.shards, waits, *traffic, helped=replica.helped()
        )
        if leads:
            at = CLOCK.now()
            for number, one in enumerate(results, step):
                training.report(Applied(number, one.loss, one.samples, one.fingerprint, task.generation, at))
        if leads and (lines := replica.plan_lines()):
            task.show(lines)
        step += len(results)
        if task.profile:
            task.profile.at(step)
        if step == task.steps:  # before the last evaluation, which may fail
            replica.save_weights(task.run_dir / "weights.safetensors")
        if training.evaluates and training.is_evaluation_due(step):
            metrics = training.evaluate(step)
        training.save_if_due(step)
    if last is None:  # the steps were done before this generation, whose leader may have died before it saved
        replica.save_weights(task.run_dir / "weights.safetensors")
    digest = replica.weights_sha256()
    if not leads:  # a member with its own replica reports its digest for comparison
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


def _is_missing(replica: Replica, applied: int) -> bool:
    """Whether this state must still be evaluated. Rank 0 decides: an aborted evaluation may have ended on some
    members."""
    return replica.exchange.gather(b"missing" if replica.note()[0] != applied else b"done")[0] == b"missing"


@dataclass(frozen=True)
class LastReports:
    """What a replica remembered at the end of its generation: a coordinator that was away then asks for it later."""

    steps: list[Applied]
    evaluated: tuple[int, bytes]

    @classmethod
    def of(cls, replica: Seated) -> LastReports:
        return cls(replica.remembered(0), replica.note())

    def remembered(self, first: int) -> list[Applied]:
        return [one for one in self.steps if one.step >= first]

    def note(self) -> tuple[int, bytes]:
        return self.evaluated


def report_again(replica: Seated | LastReports, progress: Progress, reported: int) -> None:
    """Repeat reports that earlier members or a coordinator may have lost. Any member can do it."""
    progress.reports.extend(map(report_of, replica.remembered(reported)))
    evaluated, metrics = _last_evaluation(replica)
    if metrics:
        progress.evaluations.append(Evaluation(evaluated, metrics))


def _last_evaluation(replica: Seated | LastReports) -> tuple[int, dict[str, float]]:
    evaluated, content = replica.note()
    return evaluated, json.loads(content) if content else {}
