"""The training loop of `ps:async` and `ps:ssp`: leases and updates, evaluations by rank 0 alone, and the end of the
run, which all members do together.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from distbelief.control.messages import WorkerFinished
from distbelief.job import Job
from distbelief.strategies.base import Training
from distbelief.strategies.ps.protocol.messages import AtGate, LeasedUpdate, NoLease
from distbelief.strategies.ps.rules.pace import PaceKeeper
from distbelief.strategies.ps.worker.asynchronous import AsynchronousReplica

SHORTEST_NAP_S = 0.001
LONGEST_NAP_S = 0.02


@dataclass
class _Reporter:
    """Rank 0 reports the batches of all members, in the order of their completion."""

    replica: AsynchronousReplica
    training: Training
    told: int
    samples: int = 0

    def tell(self) -> None:
        for one in self.replica.remembered(self.told):
            self.training.report(one)
            self.told = one.step + 1
            self.samples += one.samples


@dataclass
class _Clock:
    """Measures this member's computing time."""

    replica: AsynchronousReplica
    training: Training
    compute_s: float = 0.0

    def work(self, lease: LeasedUpdate) -> None:
        others_s = self.replica.comm_s + self.training.data_s
        started = time.perf_counter()
        self.replica.work(lease)
        others_s = self.replica.comm_s + self.training.data_s - others_s
        self.compute_s += time.perf_counter() - started - others_s

    def tell(self) -> None:
        self.training.spent(self.compute_s, self.replica.pace if self.replica.adaptive else ())


def train_freely(replica: AsynchronousReplica, training: Training) -> WorkerFinished:
    """Compute updates until none is left. Returns the report of the end."""
    reporter = _Reporter(replica, training, training.reported)
    metrics: dict[str, float] = {}
    if replica.exchange.rank == 0:
        training.answer_recalls()
        metrics = training.last_evaluation()
    began = time.perf_counter()
    try:
        metrics = _work(replica, training, reporter) or metrics
    finally:
        training.trained(time.perf_counter() - began, reporter.samples)
    return _finish(replica, training, metrics, reporter)


def _work(replica: AsynchronousReplica, training: Training, reporter: _Reporter) -> dict[str, float]:
    """The loop. Returns the metrics of the last evaluation, on rank 0."""
    leads = replica.exchange.rank == 0
    evaluated = replica.note()[0]
    metrics: dict[str, float] = {}
    training.begin()
    clock, nap_s, asked = _Clock(replica, training), SHORTEST_NAP_S, -1
    adapter = PaceKeeper(replica.pace) if replica.adaptive else None
    while True:
        if replica.exchange.abort.reason:  # a change of members: the last update is done now
            replica.finish()
            replica.exchange.abort.check()
        wish = training.save_wished() if leads else -1
        if wish > asked:
            asked = wish
            replica.gate(wish)
        what = replica.next()
        training.reached(replica.steps_applied(), replica.spent.updates)
        if leads:
            reporter.tell()
        match what:
            case LeasedUpdate():
                clock.work(what)
                nap_s = SHORTEST_NAP_S
                if adapter:
                    replica.pace = adapter.look(replica.spent)
            case NoLease():
                _nap(nap_s)
                nap_s = min(2 * nap_s, LONGEST_NAP_S)
            case AtGate(step=step, last=last):
                # Rank 0 decides for all: other members may not know yet that the user has asked for a checkpoint.
                saves = replica.exchange.gather(b"save" if _is_save_due(step, training) else b"")[0] == b"save"
                replica.arrived(step)
                if last:
                    return metrics
                if saves:
                    training.save(step)
                replica.exchange.gather(b"")  # all have saved
                if leads:
                    replica.open(step)
                replica.exchange.gather(b"")  # a member that asked before the gate is open would come here again
        clock.tell()
        if leads and (lines := replica.plan_lines()):
            training.show(lines)
        due = _due(training.job, replica.steps_applied())
        if leads and training.evaluates and due > evaluated:
            evaluated = due
            # Other members continue meanwhile: the parameters are a little newer than that step.
            replica.fetch()
            metrics = training.evaluate(due, alone=replica.measure_alone)


def _nap(seconds: float) -> None:
    """Wait until there may be a lease. A function of its own, so that a profile can measure it."""
    time.sleep(seconds)


def _finish(
    replica: AsynchronousReplica, training: Training, metrics: dict[str, float], reporter: _Reporter
) -> WorkerFinished:
    """All updates are done: members do the rest together, as in other strategies."""
    leads, steps = replica.exchange.rank == 0, training.steps
    if leads and (lines := replica.plan_lines()):  # perhaps other members have computed all updates
        training.show(lines)
    replica.save_weights(training.run_dir / "weights.safetensors")
    if training.evaluates:
        metrics = training.evaluate(steps)
    if _is_save_due(steps, training):
        training.save(steps, last=True)
    digest = replica.weights_sha256()
    if not leads:
        return WorkerFinished(training.worker, training.generation, steps, weights_sha256=digest)
    reporter.tell()
    past = replica.remembered(0)
    return WorkerFinished(
        training.worker, training.generation, steps, digest, past[-1].loss if past else 0.0, metrics,
        training.samples_per_s, dict(replica.staleness), *replica.traffic(),
    )  # fmt: skip


def _due(job: Job, done: int) -> int:
    """The last step at which an evaluation was due; -1: none yet."""
    return done // job.evaluate_every * job.evaluate_every if job.evaluate_every and done >= job.evaluate_every else -1


def _is_save_due(step: int, training: Training) -> bool:
    """A checkpoint that was asked for at some step is taken at the next gate."""
    return training.is_save_due(step) or 0 <= training.save_wished() <= step
