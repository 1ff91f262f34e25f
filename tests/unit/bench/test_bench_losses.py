"""A system with other losses is left out of the comparison."""

from __future__ import annotations

import pytest

from bench.compare.losses import problem

FALLING = [2.0 - 0.1 * step for step in range(12)]


def test_rounding_is_no_problem_and_other_work_is() -> None:
    assert problem([loss * (1 + 1e-6) for loss in FALLING], FALLING, same_end=0.02) == ""
    assert "at step 1," in problem([loss * 1.001 for loss in FALLING], FALLING, same_end=0.02)
    assert "at step 12," in problem([*FALLING[:-1], 1.0], FALLING, same_end=0.02)


def test_only_the_steps_that_the_reference_has_are_looked_at() -> None:
    assert problem([*FALLING, 99.0], FALLING, same_end=0.02) == ""


def test_processes_on_their_own_begin_alike() -> None:
    assert problem([FALLING[0], *FALLING[:0:-1]], FALLING, same_end=0.02, way="start") == ""
    assert problem([1.9, *FALLING[1:]], FALLING, same_end=0.02, way="start")


@pytest.mark.parametrize(("share", "fine"), [(1.0, True), (0.6, True), (0.3, False), (-1.0, False)])
def test_where_nobody_waits_the_loss_falls_alike(share: float, fine: bool) -> None:
    losses = [FALLING[0] - share * (FALLING[0] - loss) for loss in FALLING]
    assert (problem(losses, FALLING, same_end=0.02, way="alike") == "") is fine


@pytest.mark.parametrize("way", ["same", "start", "alike"])
def test_what_is_no_number_is_no_loss(way: str) -> None:
    assert problem([*FALLING[:-1], float("nan")], FALLING, 0.02, way) == "a loss is not a finite number"
