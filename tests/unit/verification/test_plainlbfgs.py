"""What `sandblaster` is held against: it comes to what torch.optim.LBFGS comes to, on a convex job."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from distbelief.job import Job
from distbelief.strategies.sandblaster.strategy import Sandblaster
from distbelief.verification.plain import make_model
from distbelief.verification.plainlbfgs import train_by_search


class WithPenalty(nn.Linear):
    """Logistic regression whose loss is strictly convex: the penalty comes out beside the scores."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        penalty = 0.5e-2 * self.weight.square().sum()
        return torch.cat([super().forward(images), penalty.expand(len(images), 1)], dim=1)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output[:, :-1], target) + output[:, -1].mean()


def job(steps: int, **changes: object) -> Job:
    digits = load_digits()
    images = torch.tensor(digits.data[:600], dtype=torch.float32).div(16)
    fields = {
        "model": lambda: WithPenalty(64, 10),
        "loss": loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "data": (images, torch.tensor(digits.target[:600])),
        "global_batch": 50,
        "steps": steps,
    }
    return Job(**{**fields, **changes})  # type: ignore[arg-type]


def by_torch(one: Job, steps: int) -> tuple[nn.Module, float]:
    model = make_model(one)
    images, digits = one.data
    search = torch.optim.LBFGS(
        model.parameters(), max_iter=steps, max_eval=25 * steps, history_size=10, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        search.zero_grad()
        value = loss(model(images), digits)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    search.step(closure)  # type: ignore[arg-type]
    return model, closure().item()


def test_the_iterates_of_torch() -> None:
    one = job(steps=6)
    model = make_model(one)
    losses = list(train_by_search(one, model, Sandblaster()))
    other, expected = by_torch(one, steps=6)
    assert losses[-1] == pytest.approx(expected, rel=1e-4)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-2, atol=1e-3)


def test_the_minimum_that_torch_finds_and_then_nothing_changes() -> None:
    one = job(steps=120)
    model = make_model(one)
    losses = list(train_by_search(one, model, Sandblaster(portion=600)))
    other, expected = by_torch(one, steps=120)
    assert losses[-1] == pytest.approx(expected, rel=1e-5)
    assert losses[-1] == losses[-2]  # it has ended
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=2e-2)


def test_portions_change_no_more_than_rounding_does() -> None:
    found = []
    for portion in (7, 600):
        model = make_model(job(steps=5))
        list(train_by_search(job(steps=5), model, Sandblaster(portion=portion)))
        found.append([parameter.detach() for parameter in model.parameters()])
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-2, atol=1e-3)


def test_dropout_is_one_function_of_the_parameters() -> None:
    """Every evaluation draws the same numbers: else no line search would come to an end."""
    one = job(steps=15, model=lambda: nn.Sequential(nn.Dropout(0.3), WithPenalty(64, 10)))
    losses = list(train_by_search(one, make_model(one), Sandblaster()))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.6 * losses[0]
