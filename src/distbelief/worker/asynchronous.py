"""A generation's work where nobody waits: leases and updates, now and then an evaluation, and the end of the run."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from distbelief.control.messages import Evaluation, StepReport, Timing, WorkerFinished
from distbelief.job import Job
from distbelief.strategies.ps.protocol.messages import Gathered, Lease, Wait
from distbelief.strategies.ps.worker.asynchronous import AsynchronousReplica
from distbelief.worker.evaluate import Evaluator
from distbelief.worker.link import Progress
from distbelief.worker.origin import facts_at
from distbelief.worker.pacing import PaceKeeper
from distbelief.worker.training import Assignment, Stopwatch, report_again

SHORTEST_NAP_S = 0.001
LONGEST_NAP_S = 0.02


@dataclass
class _Reporter:
    """What the leading member tells of all: batches in the order in which they were completed."""

    replica: AsynchronousReplica
    progress: Progress
    told: int
    samples: int = 0

    def tell(self) -> None:
        for one in self.replica.remembered(self.told):
            self.progress.reports.append(
                StepReport(one.step, one.loss, one.samples, one.fingerprint, one.at, one.generation)
            )
            self.told = one.step + 1
            self.samples += one.samples


@dataclass
class _Clock:
    """Where this member's time goes."""

    replica: AsynchronousReplica
    watch: Stopwatch
    compute_s: float = 0.0

    def work(self, lease: Lease) -> None:
        others_s = self.replica.comm_s + self.watch.data_s
        started = time.perf_counter()
        self.replica.work(lease)
        self.compute_s += time.perf_counter() - started - (self.replica.comm_s + self.watch.data_s - others_s)

    def timing(self) -> Timing:
        pace = list(self.replica.pace) if self.replica.adaptive else []
        return Timing(
            self.watch.data_s,
            self.compute_s,
            self.replica.comm_s,
            self.watch.shards,
            {},
            *self.replica.traffic(),
            pace=pace,
        )


def train_freely(
    job: Job, replica: AsynchronousReplica, evaluator: Evaluator | None, watch: Stopwatch, progress: Progress,
    task: Assignment,
) -> WorkerFinished:  # fmt: skip
    """Compute updates until there are none left, and return what is to be reported at the end."""
    reporter = _Reporter(replica, progress, task.reported)
    metrics: dict[str, float] = {}
    if replica.exchange.rank == 0:
        progress.recall = lambda reported: report_again(replica, progress, reported)
        _, note = replica.note()
        metrics = json.loads(note) if note else {}
    began = time.perf_counter()
    try:
        metrics = _work(job, replica, evaluator, watch, progress, task, reporter) or metrics
    finally:
        watch.speed.seconds += time.perf_counter() - began
        watch.speed.samples += reporter.samples
    return _finish(replica, evaluator, watch, progress, task, metrics, reporter)


def _work(
    job: Job, replica: AsynchronousReplica, evaluator: Evaluator | None, watch: Stopwatch, progress: Progress,
    task: Assignment, reporter: _Reporter,
) -> dict[str, float]:  # fmt: skip
    """Until every update is done. Returns what the last evaluation gave, on the member that does them."""
    leads = replica.exchange.rank == 0
    evaluated = replica.note()[0]
    metrics: dict[str, float] = {}
    watch.data_s, watch.shards = 0.0, 0
    clock, nap_s, asked = _Clock(replica, watch), SHORTEST_NAP_S, -1
    adapter = PaceKeeper(replica.pace) if replica.adaptive else None
    while True:
        if replica.exchange.abort.reason:  # a change of members: now, that the last update is done
            replica.finish()
            replica.exchange.abort.check()
        wish = task.saver.wished if task.saver and leads else -1
        if wish > asked:
            asked = wish
            replica.gate(wish)
        what = replica.next()
        progress.step = replica.steps_applied()
        if task.profile:
            task.profile.at(replica.spent.updates)
        if leads:
            reporter.tell()
        match what:
            case Lease():
                clock.work(what)
                nap_s = SHORTEST_NAP_S
                if adapter:
                    replica.pace = adapter.look(replica.spent)
            case Wait():
                _nap(nap_s)
                nap_s = min(2 * nap_s, LONGEST_NAP_S)
            case Gathered(step=step, last=last):
                # Nobody goes on before all know; the first one decides, for others may not have heard of a wish yet.
                saves = replica.exchange.gather(b"save" if _is_save_due(step, task) else b"")[0] == b"save"
                replica.arrived(step)
                if last:
                    return metrics
                if saves:
                    _save(replica, step, task)
                replica.exchange.gather(b"")  # all have saved
                if leads:
                    replica.open(step)
                replica.exchange.gather(b"")  # else some would ask while it is shut, and wait here once more
        progress.timing = clock.timing()
        if leads and (lines := replica.plan_lines()):
            task.show(lines)
        due = _due(job, replica.steps_applied())
        if leads and evaluator and due > evaluated:
            evaluated = due
            metrics = _evaluate_alone(evaluator, replica, progress, due)


def _nap(seconds: float) -> None:
    """There is nothing to do yet. A function of its own for whoever measures it."""
    time.sleep(seconds)


def _finish(
    replica: AsynchronousReplica, evaluator: Evaluator | None, watch: Stopwatch, progress: Progress,
    task: Assignment, metrics: dict[str, float], reporter: _Reporter,
) -> WorkerFinished:  # fmt: skip
    """All updates are done: members do the rest together, as in other strategies."""
    leads = replica.exchange.rank == 0
    if leads and (lines := replica.plan_lines()):  # perhaps others have done it all
        task.show(lines)
    replica.save_weights(task.run_dir / "weights.safetensors")
    if evaluator:
        metrics = evaluator.evaluate(replica)
        replica.keep_note(json.dumps(metrics).encode())
        if leads:
            progress.evaluations.append(Evaluation(task.steps, metrics))
    if _is_save_due(task.steps, task):
        _save(replica, task.steps, task, last=True)
    digest = replica.weights_sha256()
    if not leads:
        return WorkerFinished(task.worker, task.generation, task.steps, weights_sha256=digest)
    reporter.tell()
    past = replica.remembered(0)
    return WorkerFinished(
        task.worker, task.generation, task.steps, digest, past[-1].loss if past else 0.0, metrics,
        watch.speed.per_s(), dict(replica.staleness), *replica.traffic(),
    )  # fmt: skip


def _due(job: Job, done: int) -> int:
    """The last step at which an evaluation was due; -1: none yet."""
    return done // job.evaluate_every * job.evaluate_every if job.evaluate_every and done >= job.evaluate_every else -1


def _evaluate_alone(
    evaluator: Evaluator, replica: AsynchronousReplica, progress: Progress, due: int
) -> dict[str, float]:
    """The others go on meanwhile. The parameters are those of this moment, a little after the step that it is for."""
    replica.fetch()
    metrics = evaluator.evaluate_with(replica.measure_alone, lambda payload: [payload])
    replica.keep_note(json.dumps(metrics).encode())
    progress.evaluations.append(Evaluation(due, metrics))
    return metrics


def _save(replica: AsynchronousReplica, step: int, task: Assignment, last: bool = False) -> None:
    assert task.saver is not None
    task.saver.take(replica, step, task.generation, facts_at(task.facts, replica, step), last=last)


def _is_save_due(step: int, task: Assignment) -> bool:
    """A checkpoint that was asked for at some step is taken at the next at which all come to a halt."""
    saver = task.saver
    return saver is not None and (saver.is_due(step, task.steps) or 0 <= saver.wished <= step)
