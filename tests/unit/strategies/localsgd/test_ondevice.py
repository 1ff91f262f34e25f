"""local_sgd whose replicas are trained on an accelerator, with the host's memory standing in for a device's: the bits
of a plain loop, and of replicas that are trained on the host. On real devices: tests/gpu."""

from __future__ import annotations

import pytest

from distbelief.job import Job
from distbelief.strategies.base import Saved
from distbelief.strategies.localsgd import prepared
from distbelief.strategies.localsgd.strategy import LocalSGD
from distbelief.strategies.localsgd.trainer import DeviceTrainer, LocalTrainer
from distbelief.verification.plain import make_model
from distbelief.verification.plainlocal import train_locally
from tests.support.replicas.local import Trainer, assert_same_bits, job_of


def on_device(patch: pytest.MonkeyPatch, job: Job, how: LocalSGD, saved: Saved | None = None) -> Trainer:
    with patch.context() as here:
        here.setattr(prepared, "LocalTrainer", DeviceTrainer)
        made = Trainer(job, how, lambda step=-1: saved)
    assert type(made.replica._trainer) is DeviceTrainer
    return made


@pytest.mark.parametrize("optimizer", ["AdamW", "momentum", "Lars"])
@pytest.mark.parametrize(
    "how",
    [
        LocalSGD(3, replicas=3),
        LocalSGD(1, replicas=3),  # in every fourth round the last replicas have no samples at all
        LocalSGD(3, replicas=4, outer="nesterov", compression="topk=0.1"),
    ],
    ids=str,
)
def test_the_bits_of_a_plain_loop(monkeypatch: pytest.MonkeyPatch, optimizer: str, how: LocalSGD) -> None:
    job = job_of(optimizer, schedule=lambda step: 1 / (1 + step))
    trainer = on_device(monkeypatch, job, how)
    results = trainer.train()
    model = make_model(job)
    losses = list(train_locally(job, model, how))
    assert_same_bits(trainer.weights(), dict(model.state_dict()))
    assert [one.loss for one in results] == losses


def test_after_every_round_it_has_the_committed_values_and_saves_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    job, how = job_of("AdamW"), LocalSGD(3, replicas=3, outer="nesterov", compression="int8")
    there, here = on_device(monkeypatch, job, how), Trainer(job, how)
    assert type(here.replica._trainer) is LocalTrainer
    for until in (3, 6):
        there.train(until)
        here.train(until)
        assert_same_bits(there.weights(), here.weights())
        assert there.replica.weights_sha256() == here.replica.weights_sha256()
    saved = there.saved()
    assert_same_bits(dict(saved.tensors), dict(here.saved().tensors))
    again = on_device(monkeypatch, job, how, saved)
    again.train()
    here.train()
    assert_same_bits(again.weights(), here.weights())


def test_a_round_that_is_begun_again_consumes_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    job, how = job_of("momentum"), LocalSGD(3, replicas=3, compression="topk=0.05")
    smooth, rough = on_device(monkeypatch, job, how), on_device(monkeypatch, job, how)
    smooth.train()
    rough.train(until=3)
    rough.replica.compute(3)  # and it comes to nothing
    rough.train()
    assert_same_bits(rough.weights(), smooth.weights())
