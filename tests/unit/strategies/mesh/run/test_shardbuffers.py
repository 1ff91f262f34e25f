"""Buffers under shards: what one leaves is hidden from the next, and the average counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distbelief.errors import JobError
from distbelief.strategies.mesh.run.runner import ShardBuffers


class Counting(nn.Module):
    """A running mean, a count, a constant that nobody changes, and a buffer that is replaced instead of written to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.1, 0.2]))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("constant", torch.linspace(0.1, 1, 50))
        self.register_buffer("replaced", torch.tensor(1.0))
        self.register_buffer("absent", None)

    def see(self, x: float) -> None:
        self.mean.mul_(0.5).add_(0.5 * x)
        self.count += 1
        self.replaced = self.replaced + x


def step(model: Counting, buffers: ShardBuffers, seen: list[float]) -> None:
    buffers.begin()
    for x in seen:
        buffers.lend()
        model.see(x)
        buffers.collect()
    buffers.commit(len(seen))


def test_the_average_over_the_shards_counts() -> None:
    model = Counting()
    memory = model.replaced
    buffers = ShardBuffers(model)
    step(model, buffers, [1.0, 2.0, 6.0])
    assert torch.allclose(model.mean, 0.5 * torch.tensor([0.1, 0.2]) + 0.5 * 3.0)
    assert model.count == 6  # once for the step, not once for each shard
    assert model.replaced is memory
    assert model.replaced == 4.0
    step(model, buffers, [1.0])
    assert model.count == 7
    assert model.replaced == 5.0


def test_what_nobody_changed_keeps_its_bits() -> None:
    model = Counting()
    before = model.constant.clone()
    buffers = ShardBuffers(model)
    total = before + before + before + before + before
    assert not torch.equal(total / 5, before), "averaging would change these numbers"
    step(model, buffers, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert torch.equal(model.constant, before)


def test_a_step_that_is_given_up_leaves_nothing() -> None:
    model = Counting()
    before = {name: b.clone() for name, b in model.named_buffers()}
    buffers = ShardBuffers(model)
    buffers.begin()
    buffers.lend()
    model.see(4.0)
    buffers.collect()
    buffers.lend()
    model.see(5.0)
    buffers.restore()
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    step(model, buffers, [2.0])
    assert torch.allclose(model.mean, 0.5 * before["mean"] + 1.0)
    assert model.count == 6


def test_a_member_without_shards_takes_the_sums_of_the_others() -> None:
    """As when the sums have been added over members: one that had no samples commits what the others saw."""
    active, idle = Counting(), Counting()
    theirs, mine = ShardBuffers(active), ShardBuffers(idle)
    step(active, theirs, [1.0, 3.0])
    mine.begin()
    for total, other in zip(mine.sums, theirs.sums, strict=True):
        total.copy_(other)
    mine.changed = list(theirs.changed)
    for after, other in zip(mine.after, theirs.after, strict=True):
        after.copy_(other)
    mine.commit(2)
    assert all(torch.equal(a, b) for a, b in zip(active.buffers(), idle.buffers(), strict=True))


def test_an_integer_buffer_that_depends_on_the_samples_is_refused() -> None:
    model = Counting()
    buffers = ShardBuffers(model)
    buffers.begin()
    buffers.lend()
    model.see(1.0)
    buffers.collect()
    buffers.lend()
    model.count += 2
    with pytest.raises(JobError, match="integer buffer"):
        buffers.collect()


def test_values_from_elsewhere_are_the_committed_ones_once_kept() -> None:
    model = Counting()
    buffers = ShardBuffers(model)
    model.mean.fill_(7.0)
    model.count.fill_(40)
    buffers.keep()
    step(model, buffers, [1.0])
    assert torch.equal(model.mean, torch.full((2,), 4.0))
    assert model.count == 41


def test_a_buffer_under_two_names_is_one() -> None:
    model = Counting()
    model.register_buffer("again", model.mean)
    buffers = ShardBuffers(model)
    assert len(buffers.sums) == 3
    step(model, buffers, [1.0, 3.0])
    assert torch.allclose(model.mean, 0.5 * torch.tensor([0.1, 0.2]) + 1.0)
    assert model.again is model.mean


def test_a_backward_pass_finds_what_its_own_forward_pass_has_left() -> None:
    """Although other shards have gone forward since: all forward passes come first in some schedules."""
    model = Counting()
    buffers = ShardBuffers(model)
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    losses, expected = [], torch.zeros(2)
    buffers.begin()
    for x in (1.0, 5.0):
        buffers.lend()
        model.see(x)
        losses.append((weight * model.mean).sum())
        expected += model.mean
        buffers.collect()
    for loss in losses:
        loss.backward()
    assert torch.equal(weight.grad, expected)
