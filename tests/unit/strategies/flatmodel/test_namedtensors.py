"""A replica's state under names: saved by any number of members and put back it is the same, bit for bit; and what does
not fit is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from distbelief.checkpoint.faults import CheckpointMismatch
from distbelief.checkpoint.manifest import Stretch, coverage_fault
from distbelief.checkpoint.weights import save_weights, weights_sha256
from distbelief.strategies.base import Saved
from distbelief.strategies.flatmodel import namedtensors as named
from distbelief.strategies.flatmodel.namedtensors import tied, transient
from distbelief.worker.origin import weights_of
from tests.support.replicas.states import OPTIMIZERS, STEPS, Everything, Trainer, job_with

MEMBERS = [1, 2, 3, 4]
HALF_WAY = 3


def trained(optimizer: str, steps: int = HALF_WAY) -> Trainer:
    trainer = Trainer(job_with(optimizer))
    trainer.train(steps)
    assert len(trainer.layout.tiles) > max(MEMBERS)
    return trainer


def put_back(saved: Saved, optimizer: str) -> Trainer:
    return Trainer(job_with(optimizer, seed=99), lambda: saved)  # with other initial values, so that none is left


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


# --- there and back again --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_state_saved_by_any_number_of_members_and_put_back_is_the_same(optimizer: str) -> None:
    trainer = trained(optimizer)
    first = trainer.saved(1)
    for members in MEMBERS:
        saved = trainer.saved(members)
        assert saved.tensors.keys() == first.tensors.keys()
        assert all(same(saved.tensors[name], first.tensors[name]) for name in first.tensors)
    again = put_back(saved, optimizer)
    assert again.everything() == trainer.everything()
    assert again.replica.steps_applied() == HALF_WAY
    again.replica.synchronise()
    assert weights_sha256(again.model) == weights_sha256(trainer.model)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_on_from_a_saved_state_gives_the_bits_of_training_through(optimizer: str) -> None:
    through = trained(optimizer)
    saved = through.saved(3)
    again = Trainer(job_with(optimizer), lambda: saved)
    assert again.train(STEPS) == through.train(STEPS)
    assert again.everything() == through.everything()
    assert weights_sha256(again.model) == weights_sha256(through.model)
    fresh = Trainer(job_with(optimizer))
    fresh.train(STEPS)
    assert fresh.everything() == through.everything(), "and saving changes nothing"


def test_an_optimizer_whose_state_is_lost_would_be_noticed() -> None:
    """What the comparison above rests on: momentum matters in the steps that follow."""
    through = trained("momentum")
    saved = through.saved(2)
    weights = {name: tensor for name, tensor in saved.tensors.items() if name.startswith("model/")}
    again = Trainer(job_with("momentum"), lambda: Saved(HALF_WAY, weights))
    through.train(STEPS)
    again.train(STEPS)
    assert weights_sha256(again.model) != weights_sha256(through.model)


def test_what_the_last_steps_gave_and_the_last_note_come_back_too() -> None:
    trainer = trained("SGD")
    trainer.replica.keep_note(b'{"accuracy": 0.5}')
    again = put_back(trainer.saved(2), "SGD")
    assert again.replica.remembered(0) == trainer.replica.remembered(0)
    assert again.replica.note() == (HALF_WAY, b'{"accuracy": 0.5}')


def test_an_older_note_is_not_of_this_state() -> None:
    trainer = trained("SGD", steps=2)
    trainer.replica.keep_note(b'{"accuracy": 0.5}')
    trainer.train(HALF_WAY)
    assert trainer.saved().note == b""


def test_a_snapshot_is_of_its_step_and_not_of_a_later_one() -> None:
    trainer = trained("AdamW")
    before = trainer.everything()
    saved = trainer.saved(4)
    trainer.train(STEPS)
    assert trainer.everything() != before
    assert put_back(saved, "AdamW").everything() == before


# --- names -----------------------------------------------------------------------------------------------------------


def test_every_tensor_has_its_name_and_tied_ones_the_first() -> None:
    trainer = trained("AdamW")
    saved = trainer.saved(2).tensors
    model = {name.removeprefix("model/"): t for name, t in saved.items() if name.startswith("model/")}
    expected = dict(trainer.model.state_dict())
    expected |= {"mask": trainer.model.mask, "passing": trainer.model.passing}
    del expected["again.weight"]
    assert model.keys() == expected.keys()
    assert all(same(model[name], expected[name].detach()) for name in model)
    assert model["norm.num_batches_tracked"] == HALF_WAY
    trained_ones = {name for name, p in trainer.model.named_parameters() if p.requires_grad and p.numel()}
    keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
    others = {f"optimizer/{key}/{name}" for key in keys for name in trained_ones}
    others |= {f"begun/{name}" for name in trained_ones}
    assert saved.keys() - {f"model/{name}" for name in model} == others


def test_the_state_of_an_optimizer_has_the_shape_and_type_of_its_parameter() -> None:
    saved = trained("AdamW").saved(3).tensors
    for name in ("body.weight", "short", "scale"):
        average, parameter = saved[f"optimizer/exp_avg/{name}"], saved[f"model/{name}"]
        assert (average.shape, average.dtype) == (parameter.shape, parameter.dtype)
    assert saved["optimizer/step/body.weight"] == HALF_WAY


def test_a_parameter_that_never_had_a_gradient_has_not_begun() -> None:
    saved = trained("momentum").saved(2).tensors
    assert not saved["begun/unused.weight"]
    assert saved["begun/body.weight"]
    assert not saved["optimizer/momentum_buffer/unused.weight"].any()


@pytest.mark.parametrize("members", MEMBERS)
@pytest.mark.parametrize("optimizer", ["AdamW", "Lars"])
def test_the_portions_hold_every_element_of_every_tensor_once(optimizer: str, members: int) -> None:
    """Also before the first step: the sealer says what others hold, without having seen it."""
    trainer = Trainer(job_with(optimizer))
    trainer.act_as(0, members)
    portions = trainer.replica.portions()
    assert len(portions) == members
    held: dict[str, tuple[tuple[int, ...], list[Stretch]]] = {}
    for number, portion in enumerate(portions, start=1):
        for entry in portion.entries():
            _, stretches = held.setdefault(entry.tensor, (entry.shape, []))
            stretches.append(Stretch(number, entry.first, entry.count))
    assert [fault for name, (shape, s) in held.items() if (fault := coverage_fault(name, shape, s))] == []
    trainer.train(1)
    assert held.keys() == trainer.saved(members).tensors.keys()
    assert members == 1 or len({stretch.part for _, stretches in held.values() for stretch in stretches}) == members


def test_other_names_of_tied_tensors_and_transient_buffers_are_known() -> None:
    model = Everything()
    assert tied(model) == {"again.weight": "square.weight"}
    assert transient(model) == ["mask", "passing"]


def test_a_checkpoint_of_a_model_with_tied_weights_loads_whichever_of_the_names_it_has() -> None:
    """A file of weights may have a tied tensor under each of its names."""
    saved = trained("SGD").saved()
    tensors = {**saved.tensors, "model/again.weight": saved.tensors["model/square.weight"]}
    again = put_back(Saved(HALF_WAY, tensors), "SGD")
    assert torch.equal(again.model.again.weight, saved.tensors["model/square.weight"])


# --- weights alone ---------------------------------------------------------------------------------------------------


def test_weights_alone_leave_the_optimizer_as_it_begins(tmp_path: Path) -> None:
    trainer = trained("AdamW")
    save_weights(trainer.model, tmp_path / "weights.safetensors")
    saved = weights_of(str(tmp_path / "weights.safetensors"))
    again = put_back(saved, "AdamW")
    again.replica.synchronise()
    assert again.replica.steps_applied() == 0
    assert again.replica.remembered(0) == []
    assert weights_sha256(again.model) == weights_sha256(trainer.model)
    assert not any(memory.any() for memory in again.state.optimizer)
    assert any(memory.any() for memory in trainer.state.optimizer)


# --- what does not fit -----------------------------------------------------------------------------------------------


class Wider(Everything):
    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(4, 5, bias=False)
        self.again = nn.Linear(5, 4, bias=False)
        self.more = nn.Linear(2, 2)


def test_a_state_of_another_model_is_refused_by_the_names_of_the_tensors_and_nothing_is_loaded() -> None:
    saved = trained("AdamW").saved(2)
    with pytest.raises(CheckpointMismatch, match="another model or optimizer") as caught:
        Trainer(job_with("AdamW", Wider), lambda: saved)
    error = caught.value
    assert "model/again.weight: missing in the saved state, float32 [4, 5] in the job" in error.details
    assert "model/square.weight: float32 [4, 4] in the saved state, float32 [5, 4] in the job" in error.details
    assert "model/more.bias: missing in the saved state" in error.details
    assert "model/body.weight" not in error.details
    assert "nothing was loaded" in error.hint


@pytest.mark.parametrize(("there", "here"), [("SGD", "momentum"), ("momentum", "SGD"), ("AdamW", "Adagrad")])
def test_a_state_of_another_optimizer_is_refused_by_the_names_of_what_differs(there: str, here: str) -> None:
    saved = trained(there).saved()
    with pytest.raises(CheckpointMismatch, match="optimizer/") as caught:
        put_back(saved, here)
    assert "model/body.weight" not in caught.value.details


def test_nothing_is_written_of_a_state_that_does_not_fit() -> None:
    saved = trained("SGD").saved()
    tensors = {name: tensor for name, tensor in saved.tensors.items() if name != "model/scale"}
    target = Trainer(job_with("SGD", seed=99))
    before = target.everything()
    replica = target.replica
    with pytest.raises(CheckpointMismatch, match="model/scale"):
        named.put_back(Saved(HALF_WAY, tensors), replica._state, replica._computer, replica._recipe)
    assert target.everything() == before
    assert replica.steps_applied() == 0
