"""How a step is applied to what a member holds, without anybody else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from distbelief.job import Job
from distbelief.strategies.mesh.rules.agreement import CommitDecision, StateReport
from distbelief.strategies.mesh.state.memberstate import MemberState
from distbelief.strategies.mesh.state.restore import catch_up
from tests.support.mesh.member import live_state, momentum, pieces_of

DATA = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def job() -> Job:
    return Job(
        model=lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
        loss=F.mse_loss,
        optimizer=momentum,
        data=(DATA, torch.zeros(8, 2)),
        global_batch=8,
        steps=3,
        shards=2,
    )


def fresh(**options: object) -> tuple[MemberState, nn.Module]:
    made = replace(job(), **options)  # type: ignore[arg-type]
    torch.manual_seed(0)
    assert not isinstance(made.model, nn.Module)
    model = made.model()
    return live_state(made, model), model


def verdict(step: int = 0, factor: float = 0.5) -> CommitDecision:
    return CommitDecision(step, 1.5, 8, "print", 3, 12.0, factor, 2)


def compute(state: MemberState, model: nn.Module, step: int = 0) -> list[torch.Tensor]:
    """Two shards; the gradients as they were, since a state may write into them."""
    buffers = state._buffers[0]
    buffers.begin()
    for shard in (DATA[:4], DATA[4:] + 1):
        buffers.lend()
        model(shard).square().sum().backward()
        buffers.collect()
    gradients = state.part.gradients()
    assert all(parameter.grad is None for parameter in model.parameters())
    copies = [g.clone() for g in gradients if g is not None]
    state.ready(step, gradients)
    return copies


def test_the_factor_is_on_every_gradient_and_the_schedule_on_the_rate() -> None:
    state, model = fresh(schedule=lambda step: 0.25 if step == 0 else 0.0)
    before = [p.detach().clone() for p in model.parameters()]
    gradients = compute(state, model)
    assert state.pending == 0
    state.apply(verdict(factor=0.125))
    for parameter, old, gradient in zip(model.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(parameter.detach(), old - 0.2 * 0.25 * 0.125 * gradient)
    assert (state.applied, state.pending) == (1, -1)
    assert [(one.step, one.loss, one.samples, one.generation) for one in state.history] == [(0, 1.5, 8, 3)]
    moved = [p.detach().clone() for p in model.parameters()]
    compute(state, model, 1)
    state.apply(verdict(1))  # a rate of 0: nothing moves, momentum or not
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), moved, strict=True))


def test_a_factor_of_nothing_touches_no_parameter_and_no_state_but_the_buffers() -> None:
    """A batch of weight 0: momentum would move parameters even with gradients of 0."""
    state, model = fresh()
    compute(state, model)
    state.apply(verdict())
    before = pieces_of(state)
    compute(state, model, 1)
    state.apply(verdict(1, factor=0.0))
    after = pieces_of(state)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"model/1.running_mean", "model/1.running_var", "model/1.num_batches_tracked"}
    assert state.applied == 2


def test_buffers_are_averaged_over_the_shards_that_had_samples() -> None:
    state, model = fresh()
    compute(state, model)
    state.apply(verdict())
    torch.manual_seed(0)
    linear, norm = nn.Linear(6, 4), nn.BatchNorm1d(4)
    means = []
    for shard in (DATA[:4], DATA[4:] + 1):
        alone = nn.BatchNorm1d(4)
        alone(linear(shard))
        means.append(alone.running_mean)
    torch.testing.assert_close(model[1].running_mean, sum(means) / 2)
    assert model[1].num_batches_tracked == 1
    assert norm.num_batches_tracked == 0


def test_squares_are_shared_among_those_who_hold_the_same() -> None:
    state, model = fresh()
    gradients = compute(state, model)
    names = [one.name for one in state.optimizer.held]
    whole = math.fsum(float(g.double().square().sum()) for g in gradients)
    assert state.squares(dict.fromkeys(names, 1.0)) == pytest.approx(whole)
    half = {name: 0.5 if name == "0.weight" else 1.0 for name in names}
    assert state.squares(half) == pytest.approx(whole - 0.5 * float(gradients[0].double().square().sum()))


def test_a_verdict_on_another_step_is_refused() -> None:
    state, model = fresh()
    compute(state, model)
    with pytest.raises(AssertionError):
        state.apply(verdict(1))


def test_who_was_called_away_catches_up_with_the_verdict_of_the_others() -> None:
    one, model = fresh()
    other, theirs = fresh()
    compute(one, model)
    compute(other, theirs)
    one.apply(verdict())
    theirs[1].running_mean.fill_(7.0)  # a shard of the step after that, which was given up
    positions = [StateReport(applied=1, last=one.last), StateReport(applied=0, pending=0)]
    catch_up(other, positions, 1)
    assert (other.applied, other.pending) == (1, -1)
    mine, others = pieces_of(one), pieces_of(other)
    assert all(torch.equal(mine[name], others[name]) for name in mine)


def test_who_has_nothing_pending_or_knows_no_verdict_stays_where_it_is() -> None:
    state, model = fresh()
    catch_up(state, [StateReport(applied=1, last=verdict())], 1)
    assert state.applied == 0
    compute(state, model)
    catch_up(state, [StateReport(applied=1, last=None), StateReport(applied=0, pending=0)], 1)
    assert (state.applied, state.pending) == (0, 0)


def test_everything_has_a_name_and_a_box() -> None:
    state, model = fresh()
    boxes = state.boxes()
    tensors = state.tensors()
    assert boxes == {name: box for name, (box, _) in tensors.items()}
    trained = [name for name, _ in model.named_parameters()]
    expected = {f"model/{name}" for name in [*trained, *(name for name, _ in model.named_buffers())]}
    expected |= {f"optimizer/momentum_buffer/{name}" for name in trained} | {f"begun/{name}" for name in trained}
    assert set(tensors) == expected


def test_the_tensors_show_committed_buffers_only() -> None:
    state, model = fresh()
    before = pieces_of(state)
    compute(state, model)
    after = pieces_of(state)
    assert all(torch.equal(before[name], after[name]) for name in before)
