"""The line search, against functions of one number: it finds what the conditions ask for, or says that it did not."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lbfgs import _strong_wolfe

from distbelief.strategies.sandblaster.rules import lbfgs as module
from distbelief.strategies.sandblaster.rules.lbfgs import (
    CURVATURE,
    SUFFICIENT_DECREASE,
    Ask,
    Outcome,
    strong_wolfe,
)

Function = Callable[[float], tuple[float, float]]


def search(
    f: Function, first: float = 1.0, narrowest: float = 1e-9, evaluations: int = 25
) -> tuple[Outcome, list[Ask]]:
    """Run it, and hold it to its word: `keep` is a step that was asked before, and so is the result."""
    running = strong_wolfe(*f(0.0), first, narrowest=narrowest, evaluations=evaluations)
    asked: list[Ask] = []
    try:
        ask = next(running)
        while True:
            assert ask.keep == 0.0 or ask.keep in ([a.step for a in asked[-1:]] + [a.keep for a in asked[-1:]])
            asked.append(ask)
            ask = running.send(f(ask.step))
    except StopIteration as end:
        outcome: Outcome = end.value
    assert outcome.evaluations == len(asked) <= evaluations
    assert outcome.step in (asked[-1].step, asked[-1].keep)
    if outcome.kind == "failed":
        assert outcome.step == 0.0
    else:
        loss, slope = f(0.0)
        assert f(outcome.step)[0] <= loss + SUFFICIENT_DECREASE * outcome.step * slope
        if outcome.kind == "found":
            assert abs(f(outcome.step)[1]) <= CURVATURE * abs(slope)
    return outcome, asked


def parabola(minimum: float, curvature: float = 1.0) -> Function:
    return lambda t: (curvature * (t - minimum) ** 2 / 2, curvature * (t - minimum))


def wavy(t: float) -> tuple[float, float]:
    return -t - 0.9 * math.sin(3 * t) + 0.05 * t * t, -1 - 2.7 * math.cos(3 * t) + 0.1 * t


def valley(t: float) -> tuple[float, float]:  # steep, then a long flat floor
    return math.exp(-40 * t) + 0.001 * t * t, -40 * math.exp(-40 * t) + 0.002 * t


@settings(deadline=None, max_examples=200)
@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_parabolas_of_any_scale(minimum: float, curvature: float, first: float) -> None:
    outcome, _ = search(parabola(minimum, curvature), first, narrowest=1e-12 * minimum)
    assert outcome.kind == "found"
    assert outcome.step == pytest.approx(minimum, rel=CURVATURE + 1e-6)


@settings(deadline=None, max_examples=200)
@given(
    st.floats(0.01, 10),
    st.lists(st.tuples(st.floats(-1, 1), st.floats(0.1, 20), st.floats(0, 6)), min_size=1, max_size=4),
)
def test_bumpy_functions_give_what_the_conditions_ask_for(
    first: float, waves: list[tuple[float, float, float]]
) -> None:
    def f(t: float) -> tuple[float, float]:
        loss, slope = 0.1 * t * t, 0.2 * t
        for height, rate, phase in waves:
            loss += height * math.sin(rate * t + phase)
            slope += height * rate * math.cos(rate * t + phase)
        return loss, slope

    if f(0.0)[1] < -1e-3:
        outcome, _ = search(f, first, evaluations=60)
        assert outcome.kind == "found"


@pytest.mark.parametrize(("f", "first"), [(parabola(3.0), 0.1), (parabola(0.01), 1.0), (valley, 1.0), (valley, 0.001)])
def test_the_points_are_those_of_torch(f: Function, first: float) -> None:
    theirs: list[float] = []

    def objective(x: torch.Tensor, t: float, d: torch.Tensor) -> tuple[float, torch.Tensor]:
        theirs.append(float(t))
        loss, slope = f(float(t))
        return loss, torch.tensor([slope], dtype=torch.float64)

    loss, slope = f(0.0)
    one = torch.ones(1, dtype=torch.float64)
    gradient = slope * one
    _strong_wolfe(objective, 0 * one, first, one, loss, gradient, gradient.dot(one))
    outcome, asked = search(f, first)
    assert [ask.step for ask in asked] == pytest.approx(theirs, rel=1e-12)
    assert outcome.kind == "found"


def test_the_first_step_is_taken_when_it_is_good() -> None:
    outcome, asked = search(parabola(1.1))
    assert (outcome.kind, outcome.step, len(asked)) == ("found", 1.0, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wall", [0.9, 1e-3, 1e-9])
def test_steps_shrink_away_from_where_there_is_no_loss(bad: float, wall: float) -> None:
    def barrier(t: float) -> tuple[float, float]:  # a minimum at half the way to a wall, and nothing behind it
        if t >= wall:
            return bad, bad
        return -0.5 * math.log(wall - t) - t / wall, 0.5 / (wall - t) - 1 / wall

    def cliff(t: float) -> tuple[float, float]:  # it goes down all the way to the wall
        return (-t / wall, -1 / wall) if t < wall else (bad, math.nan)

    outcome, _ = search(barrier, narrowest=0.0)
    assert outcome.kind == "found"
    outcome, asked = search(cliff, narrowest=0.0)
    assert outcome.kind == "best"
    assert wall / 2 < outcome.step < wall
    assert len(asked) == 25


def test_a_gradient_that_is_not_finite_is_no_point_either() -> None:
    outcome, _ = search(lambda t: (-t, math.nan) if t > 0.5 else ((t - 0.4) ** 2, 2 * (t - 0.4)))
    assert outcome.kind == "found"
    assert outcome.step <= 0.5


def test_no_lower_bound_ends_with_the_best_so_far() -> None:
    outcome, asked = search(lambda t: (-t, -1.0), evaluations=7)
    assert outcome == Outcome("best", 1e6, 7)
    assert [ask.step for ask in asked] == pytest.approx([10.0**k for k in range(7)])


def test_a_rise_between_two_steps_is_a_bracket_though_both_slope_down() -> None:
    running = strong_wolfe(0.0, -1.0, 1.0)
    assert next(running) == Ask(1.0, 0.0)
    far = running.send((-1.0, -1.0))
    assert far.step > 1.0
    ask = running.send((-0.9, -1.0))  # lower than the start, higher than at 1
    assert 1.0 < ask.step < far.step
    assert ask.keep == 1.0


def test_a_wrong_slope_fails_and_says_so() -> None:
    outcome, asked = search(lambda t: (t, -1.0), narrowest=1e-6)
    assert outcome == Outcome("failed", 0.0, len(asked))
    assert asked[-1].step < 1e-4


def test_a_flat_function_fails() -> None:
    outcome, _ = search(lambda t: (1.0, -1e-3))
    assert outcome.kind == "failed"


def test_nothing_but_nan_fails() -> None:
    outcome, asked = search(lambda t: (math.nan, math.nan) if t else (1.0, -1.0), narrowest=0.0)
    assert (outcome.kind, len(asked)) == ("failed", 25)


@pytest.mark.parametrize("evaluations", range(1, 12))
def test_every_limit_on_evaluations_is_kept(evaluations: int) -> None:
    for f, first in ((wavy, 0.01), (wavy, 40.0), (valley, 5.0)):
        outcome, asked = search(f, first, evaluations=evaluations)
        assert outcome.kind == "found" or len(asked) == evaluations


def test_examples_run() -> None:
    assert doctest.testmod(module).failed == 0
