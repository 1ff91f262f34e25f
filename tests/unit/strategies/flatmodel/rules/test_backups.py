"""Which late shards are worth a backup."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distbelief.strategies.flatmodel.rules.stepwork import LateMember, worth_a_backup

SECONDS = st.floats(0.001, 1000)


def test_nobody_is_late() -> None:
    assert worth_a_backup([], 1.0, 0.1) == []


def test_a_shard_that_was_begun_is_left_to_its_owner() -> None:
    assert 4 not in worth_a_backup([LateMember([4, 5, 6, 7], begun=1)], elapsed_s=100.0, mine_s=0.1)
    assert worth_a_backup([LateMember([4, 5], begun=2)], elapsed_s=100.0, mine_s=0.1) == []


def test_a_member_as_fast_as_i_am_is_not_helped_with_its_next_shard() -> None:
    assert worth_a_backup([LateMember([0, 1], begun=1)], elapsed_s=1.0, mine_s=1.0) == []


def test_the_shard_that_would_come_last_is_first() -> None:
    assert worth_a_backup([LateMember([0, 1, 2], 1), LateMember([3, 4, 5, 6], 1)], elapsed_s=3.0, mine_s=1.0)[:2] == [
        6,
        5,
    ]


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=4), SECONDS, SECONDS)
def test_only_shards_that_nobody_has_begun(sizes: list[tuple[int, int]], elapsed_s: float, mine_s: float) -> None:
    late, first = [], 0
    for size, begun in sizes:
        late.append(LateMember(range(first, first + size), min(begun, size)))
        first += size
    chosen = worth_a_backup(late, elapsed_s, mine_s)
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= {shard for member in late for shard in member.shards[member.begun :]}
