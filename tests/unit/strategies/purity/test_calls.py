"""Schedules, optimizers and functions of `after_update` whose state is not committed are named; others are not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from distbelief.strategies.flatmodel.afterupdate import parameter_functions
from distbelief.strategies.flatmodel.layout import trainable
from distbelief.strategies.flatmodel.tileoptimizer import Recipe
from distbelief.strategies.purity import Impurity
from distbelief.strategies.purity.calls import check_after_update, check_optimizer, check_schedule
from tests.support.purity import check, job_of

# --- the schedule ----------------------------------------------------------------------------------------------------


class Counting:
    """Decays with each call, from a call on."""

    def __init__(self, begins: int) -> None:
        self.calls, self.begins = 0, begins

    def __call__(self, step: int) -> float:
        self.calls += 1
        return float(0.9 ** max(self.calls - self.begins, 0))


def test_a_schedule_that_counts_its_calls_is_named() -> None:
    (found,) = check_schedule(Counting(0))
    assert found.what == (
        "`schedule` gave two factors for one step (`schedule.calls`, an attribute of Counting, changed meanwhile)"
    )
    assert "a function of the step alone" in found.way_out


def test_a_schedule_that_counts_and_acts_later_is_named_and_has_its_counter_back() -> None:
    schedule = Counting(1000)
    (found,) = check_schedule(schedule)
    assert found.what.startswith(
        "`schedule` counts its calls in `schedule.calls` (an attribute of Counting), and later"
    )
    assert 0 < schedule.calls < 100


def test_a_schedule_that_draws_or_iterates_is_refused() -> None:
    rates = itertools.count(1)
    for schedule in (lambda step: float(torch.rand(())), lambda step: 1 / next(rates)):
        (found,) = check_schedule(schedule)
        assert found.what == "`schedule` gave two factors for one step"


def test_nothing_is_found_in_schedules_of_the_step() -> None:
    said: list[int] = []
    known: dict[int, float] = {}

    def telling(step: int) -> float:
        said.append(step)
        return 1.0

    def remembering(step: int) -> float:
        if step not in known:
            known[step] = math.cos(step / 10)
        return known[step]

    for schedule in (None, lambda step: 1 / (1 + step), lambda step: torch.tensor(0.5), telling, remembering):
        assert check_schedule(schedule) == []
    assert check_schedule(lambda step: 1 / step) == [], "its error is that of the step"
    assert set(said) == {0, 1}, "a later step may mean something to it"


# --- the optimizer ---------------------------------------------------------------------------------------------------


class Own(optim.Optimizer):
    """Gradient descent with momentum, which it keeps in some place; it may do something else later."""

    def __init__(self, parameters: Any, place: str = "state", begins: int = 0) -> None:
        super().__init__(parameters, {"lr": 0.1, "done": 0})
        self.place, self.calls, self.begins = place, 0, begins
        self.momenta: dict[Any, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            group["done"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                kept = self.state[parameter] if self.place == "state" else self.momenta
                key = "momentum" if self.place == "state" else parameter
                kept[key] = 0.9 * kept.get(key, torch.zeros_like(parameter)) + parameter.grad
                rate = group["lr"]
                if self.place == "calls" and self.calls > self.begins:
                    rate /= self.calls
                if self.place == "group":
                    rate /= group["done"]
                parameter.sub_(kept[key] if self.place in ("state", "attribute") else parameter.grad, alpha=rate)


class Noisy(optim.SGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter), alpha=group["lr"])


def found_in(factory: Callable[[Any], optim.Optimizer]) -> list[Impurity]:
    torch.manual_seed(1)
    parameters = [one for _, one in trainable(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)))]
    before = [one.detach().clone() for one in parameters]
    found = check_optimizer(Recipe(factory, parameters), parameters)
    assert all(torch.equal(one, value) for one, value in zip(parameters, before, strict=True))
    return found


@pytest.mark.parametrize(
    ("place", "where"),
    [
        ("attribute", "`optimizer.momenta`"),
        ("calls", "`optimizer.calls`"),
        ("group", "`param_groups[0]['done']`"),
    ],
)
def test_an_optimizer_with_state_elsewhere_is_named_with_the_place(place: str, where: str) -> None:
    (found,) = found_in(lambda parameters: Own(parameters, place))
    assert found.what.startswith("the optimizer Own keeps state outside of `optimizer.state`, in ")
    assert where in found.what
    assert "`self.state[parameter]`" in found.way_out


def test_an_optimizer_that_counts_and_acts_later_is_named() -> None:
    (found,) = found_in(lambda parameters: Own(parameters, "calls", begins=1000))
    assert found.what.startswith("the optimizer Own counts its calls in `optimizer.calls` (an attribute of Own)")


@pytest.mark.parametrize(
    "factory",
    [
        Own,  # counts too, and nothing depends on it
        lambda parameters: Noisy(parameters, lr=0.1, momentum=0.9),
        lambda parameters: optim.Adafactor(parameters),
        lambda parameters: optim.AdamW(parameters, lr=0.1),
        lambda parameters: type("MyAdam", (optim.Adam,), {})(parameters, lr=0.1, amsgrad=True),
        lambda parameters: type("MyRprop", (optim.Rprop,), {})(parameters, lr=0.1),
    ],
)
def test_nothing_is_found_in_optimizers_that_keep_their_state(factory: Callable[[Any], optim.Optimizer]) -> None:
    assert found_in(factory) == []


# --- after_update ----------------------------------------------------------------------------------------------------


def annealed(begins: int) -> Callable[[torch.Tensor], None]:
    calls = [0]

    def change(p: torch.Tensor) -> None:
        calls[0] += 1
        p.mul_(0.99 if calls[0] > begins else 1.0)

    return change


def test_a_function_of_after_update_that_begins_later_is_named() -> None:
    model = nn.Linear(6, 2)
    parameters = [one for _, one in trainable(model)]

    def found(**after_update: Callable[[torch.Tensor], object]) -> list[Impurity]:
        return check_after_update(
            parameter_functions(job_of(lambda: model, after_update=after_update), model), parameters
        )

    (one,) = found(**{"*": annealed(40)})
    assert one.what.startswith(
        "`after_update['*']` counts its calls in `calls` (a variable around the function change)"
    )
    assert found(**{"*": annealed(-10)}) == [], "it counts, and nothing depends on it"
    assert found(**{"*": lambda p: p.clamp_(-0.1, 0.1)}) == []


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["allreduce", "local_sgd:4", "ps:sync"])
def test_a_worker_checks_all_of_them(strategy: str) -> None:
    job = job_of(lambda: nn.Linear(6, 2), schedule=Counting(0), after_update={"*": annealed(40)})
    object.__setattr__(job, "optimizer", lambda parameters: Own(parameters, "calls"))
    assert [one.what.split()[0] for one in check(job, strategy)] == ["`schedule`", "the", "`after_update['*']`"]


def test_strategies_that_promise_no_bits_check_none() -> None:
    assert check(job_of(lambda: nn.Linear(6, 2), schedule=Counting(0)), "allreduce:inexact") == []
    assert check(job_of(lambda: nn.Linear(6, 2), schedule=Counting(0)), "sandblaster") == [], "it has no schedule"
