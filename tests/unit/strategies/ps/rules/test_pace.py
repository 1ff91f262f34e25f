from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distbelief.strategies.ps.rules.pace import MOST, SHARE, Pace, next_pace

seconds = st.floats(0.001, 1000)


def run(fetch_s: float, push_s: float, *start: int) -> list[Pace]:
    """Paces of a worker whose batch takes 1 s, and one fetch and one push so long."""
    paces = [Pace(*start)]
    for _ in range(20):
        pace = paces[-1]
        paces.append(next_pace(pace, 1.0, fetch_s / pace.n_fetch, push_s / pace.n_push))
    return paces


def test_it_starts_with_every_batch_and_stays_there_when_that_is_cheap() -> None:
    assert Pace() == Pace(1, 1)
    assert set(run(0.01, 0.04)) == {Pace(1, 1)}


def test_it_grows_only_until_the_share_is_kept() -> None:
    paces = run(0.01, 0.3)
    assert paces[:4] == [Pace(1, 1), Pace(1, 2), Pace(1, 4), Pace(1, 8)]
    assert set(paces[3:]) == {Pace(1, 8)}, "0.3 s every 8 batches is below 5 % of 8 s; every 4 it is not"


@settings(deadline=None)
@given(seconds, seconds, st.integers(0, 6), st.integers(0, 6))
def test_a_steady_cost_gives_a_steady_pace_within_bounds(
    fetch_s: float, push_s: float, fetch_from: int, push_from: int
) -> None:
    paces = run(fetch_s, push_s, 2**fetch_from, 2**push_from)
    last = paces[-1]
    assert paces[-2] == last, "it comes to rest"
    assert 1 <= last.n_fetch <= MOST
    assert 1 <= last.n_push <= MOST
    assert last.n_push == MOST or push_s / last.n_push <= SHARE / 2
    assert last.n_fetch == MOST or fetch_s / last.n_fetch <= SHARE / 2
    fewer = last.n_push // 2
    assert not fewer or push_s / fewer > 0.7 * SHARE / 2 * 0.999, "and is not rarer than it has to be"


@settings(deadline=None)
@given(st.floats(0.71, 1.0))
def test_noise_near_the_limit_does_not_switch_to_and_fro(part: float) -> None:
    pace = Pace(1, 4)
    assert next_pace(pace, 1.0, 0.0, 0.05 * part) == pace
    assert next_pace(pace, 1.0, 0.0, 0.05 * part / 2) == pace


def test_a_faster_link_brings_it_back() -> None:
    assert run(0.0, 0.001, 1, 64)[-1] == Pace(1, 1)


@pytest.mark.parametrize("compute_s", [0.0, math.nan, math.inf, -1.0])
def test_without_a_measurement_nothing_changes(compute_s: float) -> None:
    assert next_pace(Pace(2, 4), compute_s, 1.0, 1.0) == Pace(2, 4)
