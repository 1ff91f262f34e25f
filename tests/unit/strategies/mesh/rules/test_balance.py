"""Balance: the best cut there is, found by trying all of them."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distbelief.errors import DistBeliefError
from distbelief.shards import Range
from distbelief.strategies.mesh.rules.balance import UnitCost, explain, partition

patient = settings(deadline=None)  # a noisy machine is no failure
costs = st.lists(
    st.builds(UnitCost, st.integers(0, 20).map(lambda n: n / 4), st.integers(0, 1000)), min_size=1, max_size=9
)


def worst(units: list[UnitCost], ranges: list[Range]) -> tuple[float, int]:
    return (
        max(sum(unit.seconds for unit in units[first:end]) for first, end in ranges),
        max(sum(unit.bytes for unit in units[first:end]) for first, end in ranges),
    )


def every_cut(units: int, stages: int) -> list[list[Range]]:
    return [list(pairwise((0, *places, units))) for places in combinations(range(1, units), stages - 1)]


@patient
@given(costs, st.integers(1, 9), st.sampled_from([0.0, 0.1, 1.0, 5.0]))
def test_no_cut_is_better(units: list[UnitCost], stages: int, weight: float) -> None:
    stages = min(stages, len(units))
    seconds, size = sum(unit.seconds for unit in units) or 1.0, sum(unit.bytes for unit in units) or 1

    def worth(ranges: list[Range]) -> float:
        slowest, largest = worst(units, ranges)
        return slowest / seconds + weight * largest / size

    ranges = partition(units, stages, memory_weight=weight)
    assert len(ranges) == stages
    assert ranges[0][0] == 0
    assert ranges[-1][1] == len(units)
    assert all(first < end for first, end in ranges)
    assert all(one[1] == two[0] for one, two in pairwise(ranges))
    assert worth(ranges) <= min(map(worth, every_cut(len(units), stages))) + 1e-9


@patient
@given(costs, st.integers(1, 9))
def test_memory_decides_among_equally_fast_cuts(units: list[UnitCost], stages: int) -> None:
    stages = min(stages, len(units))
    found = worst(units, partition(units, stages, memory_weight=1e-9))
    assert found == min(worst(units, ranges) for ranges in every_cut(len(units), stages))


def test_among_equal_cuts_the_most_even_one() -> None:
    units = [UnitCost(5.0, 1), UnitCost(1.0, 1), UnitCost(1.0, 1), UnitCost(1.0, 1), UnitCost(1.0, 1)]
    assert partition(units, 3) == [(0, 1), (1, 3), (3, 5)]


def test_a_large_model_is_cut_at_once() -> None:
    units = [UnitCost(1.0 + (n * 7919 % 13) / 10, 1000 + n * 104729 % 977) for n in range(120)]
    ranges = partition(units, 8)
    assert worst(units, ranges)[0] < 1.1 * sum(unit.seconds for unit in units) / 8


def test_more_stages_than_units_is_refused() -> None:
    with pytest.raises(DistBeliefError, match="2 units cannot be cut into 3 stages"):
        partition([UnitCost(1.0, 1)] * 2, 3)


def test_every_stage_has_a_line() -> None:
    lines = explain([UnitCost(0.25, 1 << 20)] * 4, [(0, 1), (1, 4)], ["embedding", "a", "b", "c"])
    assert lines == [
        "stage 1: embedding, 250.0 ms (25 %), 1.0 MiB",
        "stage 2: a – c, 750.0 ms (75 %), 3.0 MiB",
    ]
