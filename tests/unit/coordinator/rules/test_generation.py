"""Who takes which place in a new mesh: what is still there of the state keeps a seat, and little moves."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from distbelief.coordinator.rules.generation import seat
from distbelief.strategies.rules.degrees import Degrees, Wish, fit

wishes = st.builds(
    Wish,
    data=st.none() | st.integers(1, 3),
    sharded=st.integers(1, 3),
    tensor=st.integers(1, 4),
    pipeline=st.integers(1, 4),
) | st.builds(Wish, data=st.just(1), sharded=st.none())


def part(degrees: Degrees, rank: int) -> tuple[int, int, int]:
    place = degrees.place(rank)
    return place.pipeline, place.sharded, place.tensor


@given(wishes, st.integers(1, 24), st.integers(0, 4), st.data())
def test_whatever_part_of_the_state_is_still_there_is_among_the_members(
    wish: Wish, before: int, spares: int, data: st.DataObject
) -> None:
    shards = 12
    old = fit(wish, before, shards)
    dead = data.draw(st.sets(st.integers(0, old.size - 1), max_size=old.size))
    ranks: list[int | None] = [rank for rank in range(old.size) if rank not in dead]
    ranks += [None] * spares
    assume(ranks)
    new = fit(wish, len(ranks), shards)
    order = seat(new, old, ranks)
    assert len(order) == len(set(order)) == new.size
    alive = {part(old, rank) for rank in ranks if rank is not None}
    seated = {part(old, rank) for rank in (ranks[one] for one in order) if rank is not None}
    if len(alive) == old.parts:
        assert seated == alive
    if new == old and not dead:
        assert [ranks[one] for one in order] == list(range(old.size)), "nobody moves without need"


@pytest.mark.parametrize(
    ("new", "old", "ranks", "order"),
    [
        (Degrees(4), None, [None, None, None, None, None], [0, 1, 2, 3]),
        (Degrees(4), Degrees(4), [0, 2, 3, None], [0, 3, 1, 2]),  # the newcomer sits where the dead did
        (Degrees(3), Degrees(4), [0, 2, 3], [0, 1, 2]),
        (Degrees(4), Degrees(3), [0, 1, 2, None], [0, 1, 3, 2]),  # all of the new last stage was in the old one
        (Degrees(2), Degrees(2, 2), [1, 2, 3], [0, 1]),
        (Degrees(2), Degrees(2, 2), [0, 1, 3], [0, 2]),  # not both holders of the first stage
        (Degrees(2, 2), Degrees(2, 2), [0, 1, 3, None], [0, 1, 3, 2]),
        (Degrees(sharded=2), Degrees(data=2, sharded=2), [0, 2, 3], [0, 2]),
        (Degrees(1), Degrees(2), [1], [0]),
    ],
)
def test_places(new: Degrees, old: Degrees | None, ranks: list[int | None], order: list[int]) -> None:
    assert seat(new, old, ranks) == order
