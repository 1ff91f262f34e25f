"""The rules of exactness about shards: what one gives depends on nothing that was computed before it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from distbelief.errors import JobError
from distbelief.strategies.flatmodel.compute import make_model
from distbelief.transport.shm.segment import SegmentClient
from tests.support.replicas.alone import Alone, Computed, job_of, kept, linear_data


@pytest.fixture
def segments() -> Iterator[SegmentClient]:
    with kept() as client:
        yield client


# --- untouched parameters --------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """The second branch is used by samples with a positive first number only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.always(x)
        return out + self.sometimes(x) if bool((x[:, 0] > 0).any()) else out


def test_an_untouched_parameter_is_skipped_and_keeps_its_own_step_count(segments: SegmentClient) -> None:
    x, y = linear_data()
    x[:8, 0] = -1.0  # step 0: nobody touches it
    x[8:15, 0], x[15, 0] = -1.0, 1.0  # step 1: only the last shard does
    make = lambda p: optim.AdamW(p, lr=0.05, weight_decay=0.5)  # noqa: E731
    alone = Alone(job_of(Branches, (x, y), optimizer=make, global_batch=8, shards=4), segments)
    model = make_model(alone.replica._job, torch.device("cpu"))  # type: ignore[attr-defined]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain = optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5, fused=True)
    for step in range(3):
        alone.step(step)
        shards = [slice(8 * step + 2 * v, 8 * step + 2 * v + 2) for v in range(4)]
        plain.zero_grad()
        for shard in shards:
            (F.mse_loss(model(x[shard]), y[shard]) * 2 / 8).backward()
        plain.step()
        if step == 0:
            assert torch.equal(alone.model.sometimes.weight, before["sometimes.weight"])
    found = dict(alone.model.named_parameters())
    assert torch.equal(found["never.weight"], before["never.weight"])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter)
    moved = nn.Parameter(before["never.weight"].clone())
    moved.grad = torch.zeros_like(moved)
    optim.AdamW([moved], lr=0.05, weight_decay=0.5).step()
    assert not torch.equal(moved, before["never.weight"]), "a zero gradient would have moved it"


# --- buffers ---------------------------------------------------------------------------------------------------------


def normed() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4))


def test_running_statistics_are_the_average_over_the_shards_not_their_sequence(segments: SegmentClient) -> None:
    x, y = linear_data()
    x += torch.arange(24).unsqueeze(1)  # every shard has another mean
    alone = Alone(job_of(normed, (x, y), global_batch=24, shards=4), segments)
    alone.step(0)
    shards = x.split(6)
    averaged = torch.stack([0.1 * shard.mean(0) for shard in shards]).mean(0)
    sequence = torch.zeros(6)
    for shard in shards:
        sequence = 0.9 * sequence + 0.1 * shard.mean(0)
    found = alone.model[0].running_mean
    torch.testing.assert_close(found, averaged)
    assert (found - sequence).abs().min() > 1.0
    assert alone.model[0].num_batches_tracked.item() == 1


def test_buffers_are_restored_before_each_shard() -> None:
    computed = Computed(job_of(normed, linear_data(), global_batch=24, shards=4))
    first = [computed.shard(0, v) for v in range(4)]
    for order in ([3, 1, 0, 2], [2, 2, 0, 3, 1]):
        for v in order:
            slot, result = computed.shard(0, v)
            assert slot == first[v][0]
            assert (result.loss_sum, result.integers) == (first[v][1].loss_sum, first[v][1].integers)


def test_a_buffer_that_is_replaced_instead_of_written_counts_too(segments: SegmentClient) -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen + x.detach().sum()
            self.calls = self.calls + 1
            out: torch.Tensor = self.layer(x)
            return out

    x, y = linear_data()
    alone = Alone(job_of(Replacing, (x, y), global_batch=8, shards=2), segments)
    expected = 0.0
    for step in range(3):
        alone.step(step)
        expected += float(x[8 * step : 8 * step + 8].sum()) / 2
    assert alone.model.seen.item() == pytest.approx(expected, rel=1e-5)
    assert alone.model.calls.item() == 3


def test_a_buffer_that_is_replaced_outside_of_training_is_not_carried_on(segments: SegmentClient) -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)
            self.register_buffer("last", torch.zeros(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                self.last = x[0]
            out: torch.Tensor = self.layer(x + self.last)
            return out

    alone = Alone(job_of(Remembering, linear_data(), global_batch=8, shards=2), segments)
    alone.step(0)
    alone.model.eval()(torch.ones(2, 6))
    alone.model.train()
    alone.replica.synchronise()
    assert torch.equal(alone.model.last, torch.zeros(6))


def test_integer_buffers_must_agree_over_the_shards(segments: SegmentClient) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)
            self.register_buffer("positive", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.positive += (x > 0).sum()
            out: torch.Tensor = self.layer(x)
            return out

    alone = Alone(job_of(Counting, linear_data(), global_batch=24, shards=4), segments)
    before = alone.model.layer.weight.clone()
    alone.replica.compute(0)
    with pytest.raises(JobError, match="integer buffer"):
        alone.replica.commit(0)
    assert torch.equal(alone.model.layer.weight, before)


def test_a_constant_buffer_stays_as_it_is(segments: SegmentClient) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)
            self.register_buffer("scale", torch.linspace(1.0, 2.0, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x * self.scale)
            return out

    alone = Alone(job_of(Scaled, linear_data(21), global_batch=21, shards=7), segments)
    alone.step(0)
    assert torch.equal(alone.model.scale, torch.linspace(1.0, 2.0, 6))


# --- random numbers --------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Uses all three generators that user code draws from."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.masks: list[tuple[Any, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = F.dropout(torch.ones(10), 0.5)
        self.masks.append((tuple(mask.tolist()), float(np.random.rand()), random.random()))
        out: torch.Tensor = self.layer(x) * mask.sum() * self.masks[-1][1] * self.masks[-1][2]
        return out


def test_random_numbers_of_a_shard_do_not_depend_on_what_was_computed_before() -> None:
    computed = Computed(job_of(Noisy, linear_data(), global_batch=24, shards=4))
    masks: dict[tuple[int, int], set[Any]] = {}
    slots: dict[tuple[int, int], set[bytes]] = {}
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 0, 3, 1]):
        for step, shard in itertools.product((0, 5), order):
            torch.rand(7), np.random.rand(3), random.random()
            slot, _ = computed.shard(step, shard)
            slots.setdefault((step, shard), set()).add(slot)
            masks.setdefault((step, shard), set()).add(computed.model.masks[-1])  # type: ignore[operator, union-attr, index]
    assert all(len(found) == 1 for found in (*masks.values(), *slots.values()))
    assert len({next(iter(found)) for found in masks.values()}) == 8, "every (step, shard) has its own"


def test_integer_buffers_travel_to_a_member_that_computed_nothing() -> None:
    class Counters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)
            self.register_buffer("none", torch.empty(0, dtype=torch.int64))
            self.register_buffer("flags", torch.tensor([True, False]))
            self.register_buffer("count", torch.tensor([[1, 2], [3, 4]], dtype=torch.int32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            self.flags.logical_not_()
            out: torch.Tensor = self.layer(x)
            return out

    job = job_of(Counters, linear_data(), global_batch=24, shards=4)
    busy, idle = Computed(job), Computed(job)
    busy.shard(0, 0)
    idle.computer.commit_integers(busy.computer.integer_bytes())
    assert idle.model.count.tolist() == [[2, 3], [4, 5]]
    assert idle.model.flags.tolist() == [False, True]
    idle.model.count.zero_()
    idle.computer.restore_buffers(idle.committed)
    assert idle.model.count.tolist() == [[2, 3], [4, 5]]
