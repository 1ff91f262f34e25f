from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distbelief.coordinator.rules.assignment import equal, proportional

shares = st.lists(st.floats(min_value=1e-6, max_value=1e6, allow_nan=False), min_size=1, max_size=12)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, list[float]]:
    drawn = draw(shares)
    return draw(st.integers(min_value=len(drawn), max_value=200)), drawn


@given(cuts())
def test_ranges_are_contiguous_cover_all_and_leave_nobody_out(cut: tuple[int, list[float]]) -> None:
    shards, given_shares = cut
    ranges = proportional(shards, given_shares)
    assert len(ranges) == len(given_shares)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == shards
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    assert all(first < end for first, end in ranges)


@given(cuts())
def test_sizes_are_proportional_within_one(cut: tuple[int, list[float]]) -> None:
    shards, given_shares = cut
    quotas = [shards * share / math.fsum(given_shares) for share in given_shares]
    sizes = [end - first for first, end in proportional(shards, given_shares)]
    if min(quotas) >= 1:  # otherwise "at least one each" takes from the others
        assert all(abs(size - quota) < 1 + 1e-9 for size, quota in zip(sizes, quotas, strict=True))
    for size, quota in zip(sizes, quotas, strict=True):
        assert size <= math.ceil(quota + 1e-9)  # nobody gains from another's minimum


@given(cuts())
def test_a_larger_share_never_gets_fewer_shards(cut: tuple[int, list[float]]) -> None:
    shards, given_shares = cut
    sizes = [end - first for first, end in proportional(shards, given_shares)]
    by_share = sorted(zip(given_shares, sizes, strict=True))
    for (low, low_size), (high, high_size) in itertools.pairwise(by_share):
        assert low == high or low_size <= high_size


@given(st.integers(1, 64), st.integers(1, 64))
def test_equal_differs_by_at_most_one(shards: int, members: int) -> None:
    members = min(shards, members)
    sizes = [end - first for first, end in equal(shards, members)]
    assert max(sizes) - min(sizes) == (1 if shards % members else 0)


def test_lower_ranks_take_the_remainder() -> None:
    assert equal(8, 3) == [(0, 3), (3, 6), (6, 8)]
    assert proportional(10, [3, 1]) == [(0, 8), (8, 10)]


def test_scale_of_the_shares_does_not_matter() -> None:
    assert proportional(7, [0.1, 0.2, 0.4]) == proportional(7, [100 * 0.1, 100 * 0.2, 100 * 0.4])


@pytest.mark.parametrize(("shards", "given_shares"), [(2, [1, 1, 1]), (2, []), (0, [1])])
def test_more_members_than_shards_or_none_is_refused(shards: int, given_shares: list[float]) -> None:
    with pytest.raises(ValueError, match="members cannot each have one of"):
        proportional(shards, given_shares)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_share_that_is_no_positive_number_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite number above 0"):
        proportional(4, [1.0, bad])
