"""local_sgd in one process: against the plain loop, with any optimizer; its state saved and put back; its counting."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn, optim

from distbelief.checkpoint.faults import CheckpointMismatch
from distbelief.errors import JobError, NonFiniteLoss
from distbelief.job import Job
from distbelief.strategies.base import RolledBack
from distbelief.strategies.localsgd.strategy import LocalSGD
from distbelief.transport.abort import Aborted
from distbelief.transport.singlemember import SingleMemberExchange
from distbelief.verification.plain import make_model
from distbelief.verification.plainlocal import train_locally
from tests.support.replicas.local import STEPS, Trainer, assert_same_bits, job_of
from tests.support.replicas.states import OPTIMIZERS
from tests.support.replicas.states import Trainer as AllReduceTrainer


# Not Adafactor: it makes steps of full size from the rounding of a gradient that is zero, as that of a bias before a
# norm is, also in allreduce.
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "Adafactor"])
@pytest.mark.parametrize(
    "how",
    [
        LocalSGD(3, replicas=3),
        LocalSGD(3, replicas=4, outer="nesterov"),
        LocalSGD(1, replicas=3),  # in every fourth round the last replicas have no samples at all
        LocalSGD(1, replicas=6, outer="nesterov"),
        LocalSGD(3, replicas=3, compression="bf16"),
        LocalSGD(1, replicas=3, compression="int8=16"),
        LocalSGD(3, replicas=4, outer="nesterov", compression="topk=0.1"),
    ],
    ids=str,
)
def test_the_bits_of_a_plain_loop(optimizer: str, how: LocalSGD) -> None:
    """With partial batches, several types, dropout, statistics, tied, frozen and unused parameters, and clipping."""
    job = job_of(optimizer, schedule=lambda step: 1 / (1 + step))
    trainer = Trainer(job, how)
    results = trainer.train()
    model = make_model(job)
    losses = list(train_locally(job, model, how))
    assert_same_bits(trainer.weights(), dict(model.state_dict()))
    assert [one.loss for one in results] == losses


@pytest.mark.parametrize(
    ("optimizer", "how", "seed"),
    [("momentum", LocalSGD(3, replicas=4, outer="nesterov"), 1), ("AdamW", LocalSGD(1, 6, outer="nesterov"), 2)],
)
def test_the_last_bits_of_a_norm_do_not_reach_parameters_of_float64(optimizer: str, how: LocalSGD, seed: int) -> None:
    """The plain loop takes the norm per parameter, the replica per tile."""
    job = job_of(optimizer, schedule=lambda step: 1 / (1 + step), seed=seed)
    trainer = Trainer(job, how)
    trainer.train()
    model = make_model(job)
    list(train_locally(job, model, how))
    assert_same_bits(trainer.weights(), dict(model.state_dict()))


@pytest.mark.parametrize("optimizer", ["momentum", "Lars"])
@pytest.mark.parametrize(
    "how", [LocalSGD(3, replicas=4, outer="nesterov"), LocalSGD(1, replicas=3, compression="int8=16")]
)
def test_functions_after_every_local_step_and_after_the_outer_step(optimizer: str, how: LocalSGD) -> None:
    """The outer step's momentum would take weights beyond the limit."""
    job = job_of(optimizer, after_update={"*.weight": lambda p: p.clamp_(-0.05, 0.05)})
    trainer = Trainer(job, how)
    trainer.train()
    model = make_model(job)
    list(train_locally(job, model, how))
    assert_same_bits(trainer.weights(), dict(model.state_dict()))
    limited = [p for name, p in trainer.model.named_parameters() if name.endswith(".weight")]
    assert any(p.abs().max() == torch.tensor(0.05, dtype=p.dtype) for p in limited)
    without = Trainer(job_of(optimizer), how)
    without.train()
    assert any(
        not torch.equal(a, b) for a, b in zip(trainer.weights().values(), without.weights().values(), strict=True)
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_saved_state_goes_on_to_the_same_bits(optimizer: str) -> None:
    job, how = job_of(optimizer), LocalSGD(3, replicas=3, outer="nesterov")
    first = Trainer(job, how)
    first.train(until=6)
    saved = first.saved()
    again = Trainer(job, how, lambda step=-1: saved)
    assert again.replica.steps_applied() == 6
    assert [one.fingerprint for one in again.train()] == [one.fingerprint for one in first.train()]
    assert_same_bits(again.weights(), first.weights())
    last = saved.history[-1]
    assert (last.step, last.loss) == (5, first.replica.remembered(5)[0].loss)


def test_a_replica_that_forgot_its_own_momentum_would_come_elsewhere() -> None:
    """That what is saved of the replicas counts: without it the weights are others."""
    job, how = job_of("momentum"), LocalSGD(3, replicas=3)
    first = Trainer(job, how)
    first.train(until=6)
    saved = first.saved()
    inner = [name for name in saved.tensors if name.startswith("replica1/optimizer/momentum_buffer/")]
    assert inner
    for name in inner:
        saved.tensors[name].zero_()
    again = Trainer(job, how, lambda step=-1: saved)
    again.train()
    first.train()
    assert any(not torch.equal(a, b) for a, b in zip(again.weights().values(), first.weights().values(), strict=True))


@pytest.mark.parametrize("method", ["bf16", "int8", "topk=0.05"])
def test_what_a_replica_owes_is_saved_and_counts(method: str) -> None:
    job, how = job_of("momentum"), LocalSGD(3, replicas=3, compression=method)
    first = Trainer(job, how)
    first.train(until=6)
    saved, forgetful = first.saved(), first.saved()
    owed = [name for name in saved.tensors if name.startswith("replica1/residual/")]
    assert any(bool(saved.tensors[name].any()) for name in owed)
    again = Trainer(job, how, lambda step=-1: saved)
    again.train()
    first.train()
    assert_same_bits(again.weights(), first.weights())
    for name in owed:
        forgetful.tensors[name].zero_()
    other = Trainer(job, how, lambda step=-1: forgetful)
    other.train()
    assert any(not torch.equal(a, b) for a, b in zip(other.weights().values(), first.weights().values(), strict=True))


def test_all_that_was_sent_and_what_is_owed_is_the_sum_of_all_differences() -> None:
    """One replica whose outer step is its own difference: where it is, less what it owes, is where it wants to be."""
    job = job_of("momentum")
    plain, coded = Trainer(job, LocalSGD(1, replicas=1)), Trainer(job, LocalSGD(1, replicas=1, compression="int8=8"))
    plain.train(until=1)
    coded.train(until=1)
    residuals = coded.saved().tensors
    for name, parameter in coded.model.named_parameters():
        if (owed := residuals.get(f"replica0/residual/{name}")) is not None:
            torch.testing.assert_close(parameter - owed, plain.weights()[name], rtol=1e-5, atol=1e-7)


def test_a_round_that_is_begun_again_consumes_nothing_twice() -> None:
    job, how = job_of("momentum"), LocalSGD(3, replicas=3, compression="topk=0.05")
    smooth, rough = Trainer(job, how), Trainer(job, how)
    smooth.train()
    rough.train(until=3)
    rough.replica.compute(3)  # and it comes to nothing
    rough.train()
    assert_same_bits(rough.weights(), smooth.weights())


class GivenUp(SingleMemberExchange):
    """An exchange that is aborted at the member's n-th gather, as if a newcomer had joined."""

    gathers = 0

    def gather(self, payload: bytes) -> list[bytes]:
        self.gathers -= 1
        if not self.gathers:
            raise Aborted
        return super().gather(payload)


@pytest.mark.parametrize("gathers", range(1, 8))
def test_a_rollback_of_a_generation_that_is_given_up_is_reported_by_the_next_one(gathers: int) -> None:
    """Whichever operation was interrupted; and no later generation repeats the report."""
    job, how = job_of("momentum"), LocalSGD(3, replicas=3)
    first = Trainer(job, how, exchange=GivenUp, generation=1)
    first.train(until=6)
    before, exchange = first.weights(), first.exchange
    assert isinstance(exchange, GivenUp)

    def begin(generation: int) -> Trainer:
        return Trainer(job, how, exchange=lambda geometry: exchange, generation=generation)

    inner = exchange.state(0, "inner").buffer
    inner[:] = bytes(len(inner))  # the members that had the replicas' optimizer states have died
    exchange.gathers = gathers
    with pytest.raises(Aborted):
        begin(generation=2)
    again = begin(generation=3)
    assert again.replica.rolled_back() == RolledBack(6, 0, "where the run began")
    assert begin(generation=4).replica.rolled_back() is None
    again.train(until=6)
    assert_same_bits(again.weights(), before)
    assert begin(generation=5).replica.rolled_back() is None


def test_a_state_of_another_number_of_replicas_does_not_fit() -> None:
    job = job_of("momentum")
    first = Trainer(job, LocalSGD(3, replicas=3))
    first.train(until=3)
    saved = first.saved()
    with pytest.raises(CheckpointMismatch, match="replica2"):
        Trainer(job, LocalSGD(3, replicas=2), lambda step=-1: saved)
    with pytest.raises(JobError, match="after 3 steps lies within a round of 2 local steps"):
        Trainer(job, LocalSGD(2, replicas=3), lambda step=-1: saved)


def test_everything_is_counted_in_steps() -> None:
    trainer = Trainer(job_of(), LocalSGD(3, replicas=3))
    replica = trainer.replica
    replica.compute(0)
    last = replica.commit(0)
    assert (len(last.before), replica.steps_applied()) == (2, 3)
    assert [one.step for one in replica.remembered(1)] == [1, 2]
    assert [one.samples for one in (*last.before, last)] == [12, 12, 12]
    replica.keep_note(b"metrics")
    assert replica.note() == (3, b"metrics")
    trainer.train()
    assert replica.steps_applied() == STEPS  # the last round has two steps
    assert [one.samples for one in replica.remembered(0)] == [12, 12, 12, 4, 12, 12, 12, 4]


def test_one_replica_and_one_local_step_is_allreduce_within_rounding() -> None:
    job = job_of("momentum")
    local = Trainer(job, LocalSGD(1, replicas=1))
    results = local.train(until=6)
    other = AllReduceTrainer(job)
    other.train(until=6)
    assert [one.loss for one in results] == pytest.approx([one.loss for one in other.replica.remembered(0)], rel=1e-5)
    for name, tensor in other.model.state_dict().items():
        torch.testing.assert_close(local.weights()[name], tensor, rtol=1e-5, atol=1e-6)


def test_the_average_is_the_mean_of_replicas_that_trained_apart() -> None:
    """By hand: two replicas, one weight, two local steps of gradient descent each on their own samples."""
    x, y = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([[1.0], [0.0], [2.0], [1.0]])
    job = Job(
        model=lambda: nn.Linear(1, 1, bias=False),
        loss=nn.functional.mse_loss,
        optimizer=lambda p: optim.SGD(p, lr=0.1),
        data=(x, y),
        global_batch=4,
        shards=2,
        steps=STEPS,
        shuffle=False,
    )
    trainer = Trainer(job, LocalSGD(2, replicas=2))
    start = trainer.model.weight.item()
    order = [trainer.replica._fetch(0, shard, shard + 1)[0] for shard in range(2)]
    ends = []
    for own_x, own_y in order:
        weight = start
        for _ in range(2):
            weight -= 0.1 * float((2 * (weight * own_x - own_y) * own_x).mean())
        ends.append(weight)
    trainer.train(until=2)
    assert trainer.model.weight.item() == pytest.approx(sum(ends) / 2, rel=1e-6)


def test_a_loss_that_is_not_finite_names_its_step_and_shard() -> None:
    seen = itertools.count()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, target) * (float("nan") if next(seen) == 3 else 1.0)

    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    job = Job(
        model=lambda: nn.Linear(2, 1), loss=loss, optimizer=lambda p: optim.SGD(p, lr=0.1),
        data=(x, x[:, :1]), global_batch=8, shards=4, steps=STEPS,
    )  # fmt: skip
    trainer = Trainer(job, LocalSGD(4, replicas=2))
    with pytest.raises(NonFiniteLoss, match="the loss is nan at step 1, shard 1"):
        trainer.replica.compute(0)  # the first replica: shards 0 and 1 of step 0, then those of step 1
    assert trainer.replica.steps_applied() == 0
