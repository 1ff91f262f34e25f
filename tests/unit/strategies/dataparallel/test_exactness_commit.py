"""The rules of exactness about a commit: intact partial sums, nothing of a bad step, and the loss's true weight."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from distbelief.errors import NonFiniteLoss
from distbelief.strategies.flatmodel.compute import make_model
from distbelief.transport.shm.segment import SegmentClient
from tests.support.replicas.alone import Alone, job_of, kept, linear_data


@pytest.fixture
def segments() -> Iterator[SegmentClient]:
    with kept() as client:
        yield client


def normed() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4))


# --- retry -----------------------------------------------------------------------------------------------------------


def test_a_commit_leaves_the_partial_sums_intact_even_if_the_optimizer_writes_into_gradients(
    segments: SegmentClient,
) -> None:
    make = lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True)  # noqa: E731
    x, y = linear_data()
    alone = Alone(job_of(normed, (x, y), optimizer=make, global_batch=8, shards=4, clip_norm=0.1), segments)
    for step in range(3):
        alone.replica.compute(step)
        before = alone.slots()
        alone.replica.commit(step)
        assert alone.slots() == before
    probe = nn.Parameter(torch.ones(4))
    probe.grad = torch.ones(4)
    optimizer = optim.SGD([probe], lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    for _ in range(2):
        optimizer.step()
    assert not torch.equal(probe.grad, torch.ones(4)), "this optimizer does write into the gradient"


def test_computing_a_step_again_gives_the_same_partial_sums(segments: SegmentClient) -> None:
    alone = Alone(job_of(normed, linear_data(), global_batch=8, shards=4), segments)
    alone.step(0)
    alone.replica.compute(1)
    once = alone.slots()
    alone.replica.compute(1)
    assert alone.slots() == once


def test_a_step_whose_loss_is_not_finite_is_not_applied(segments: SegmentClient) -> None:
    x, y = linear_data()
    y[15] = float("nan")
    alone = Alone(job_of(normed, (x, y), global_batch=8, shards=4), segments)
    alone.step(0)
    before = [t.clone() for t in alone.model.state_dict().values()]
    alone.replica.compute(1)
    with pytest.raises(NonFiniteLoss, match="nan at step 1, shard 3"):
        alone.replica.commit(1)
    alone.replica.synchronise()
    assert all(torch.equal(a, b) for a, b in zip(before, alone.model.state_dict().values(), strict=True))
    assert alone.replica.steps_applied() == 1


# --- loss ------------------------------------------------------------------------------------------------------------


def classes(samples: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """Half of the targets are to be ignored, and unevenly over the shards; one shard has none to learn from."""
    x, _ = linear_data(samples)
    target = torch.arange(samples) % 4
    target[:5], target[6:9], target[12:18] = -100, -100, -100
    return x, target


def sum_and_weight(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.cross_entropy(output, target, reduction="sum"), (target != -100).sum()


def test_sum_and_weight_is_the_mean_over_the_batch_where_a_mean_of_means_is_not(segments: SegmentClient) -> None:
    x, target = classes()
    alone = Alone(job_of(lambda: nn.Linear(6, 4), (x, target), sum_and_weight, global_batch=24, shards=4), segments)
    model = make_model(alone.replica._job, torch.device("cpu"))  # type: ignore[attr-defined]
    loss = F.cross_entropy(model(x), target)
    loss.backward()
    shards = [(a, b) for a, b in zip(x.split(6), target.split(6), strict=True) if (b >= 0).any()]
    means = [F.cross_entropy(model(a), b).item() for a, b in shards]
    assert alone.step(0) == pytest.approx(loss.item(), rel=1e-6)
    assert abs(sum(means) / len(means) - loss.item()) > 1e-2
    torch.testing.assert_close(alone.model.weight, model.weight.detach() - 0.1 * model.weight.grad)


def test_a_mean_over_samples_is_weighted_by_true_sample_counts(segments: SegmentClient) -> None:
    """A batch of 10 in 4 shards has shards of 2 and 3 samples, and a last batch of 4 fills two of them."""
    x, y = linear_data(14)
    alone = Alone(job_of(lambda: nn.Linear(6, 4), (x, y), global_batch=10, shards=4), segments)
    model = make_model(alone.replica._job, torch.device("cpu"))  # type: ignore[attr-defined]
    plain = optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate([slice(0, 10), slice(10, 14), slice(0, 10)]):
        plain.zero_grad()
        loss = F.mse_loss(model(x[batch]), y[batch])
        loss.backward()
        plain.step()
        assert alone.step(step) == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(alone.model.weight, model.weight)


def test_a_batch_without_weight_moves_no_parameter_but_its_samples_were_seen(segments: SegmentClient) -> None:
    x, _ = linear_data(8)
    target = torch.full((8,), -100)
    make = lambda p: optim.AdamW(p, lr=0.1)  # noqa: E731
    alone = Alone(job_of(normed, (x, target), sum_and_weight, make, global_batch=8, shards=2), segments)
    before = [p.detach().clone() for p in alone.model.parameters()]
    assert alone.step(0) == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, alone.model.parameters(), strict=True))
    torch.testing.assert_close(alone.model[0].running_mean, 0.1 * x.mean(0))
