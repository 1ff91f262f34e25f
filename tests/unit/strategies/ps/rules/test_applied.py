from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distbelief.errors import DistBeliefError
from distbelief.strategies.ps.rules.applied import AppliedChanges, NumberSet

numbers = st.lists(st.integers(0, 30), max_size=60)
names = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=60)


def marks_of(held: list[int]) -> NumberSet:
    marks = NumberSet()
    for number in held:
        marks = marks.add(number)
    return marks


@settings(deadline=None)
@given(numbers)
def test_marks_are_the_set_in_its_shortest_form(held: list[int]) -> None:
    marks = marks_of(held)
    assert [number for number in range(-2, 35) if marks.holds(number)] == sorted(set(held))
    assert marks.count == len(set(held))
    edges = [0, marks.below, *(edge for stretch in marks.beyond for edge in stretch)]
    assert edges[1:] == sorted(set(edges[1:])), "no stretch is empty, and none touches the next"
    assert marks == marks_of(sorted(held)), "the order in which they came leaves no trace"


@settings(deadline=None)
@given(names)
def test_every_name_is_new_exactly_once(sent: list[tuple[int, int]]) -> None:
    applied = AppliedChanges()
    seen: set[tuple[int, int]] = set()
    for name in sent:
        assert applied.holds(*name) == (name in seen)
        applied, new = applied.add(*name)
        assert new == (name not in seen)
        seen.add(name)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(applied), type=AppliedChanges) == applied
    assert msgspec.json.decode(msgspec.json.encode(applied), type=AppliedChanges) == applied


def test_streams_in_order_take_a_few_bytes() -> None:
    applied = AppliedChanges()
    for sequence in range(2_000):
        for source in range(3):
            applied, new = applied.add(source, sequence)
            assert new
    assert applied.sources == dict.fromkeys(range(3), NumberSet(2_000))
    assert len(msgspec.msgpack.encode(applied)) < 120


def test_memory_grows_with_the_gaps_only() -> None:
    applied = AppliedChanges()
    for sequence in range(2_000):
        if sequence not in (7, 900):
            applied, _ = applied.add(0, sequence)
    assert applied.sources[0] == NumberSet(7, ((8, 900), (901, 2_000)))
    applied, _ = applied.add(0, 900)
    applied, _ = applied.add(0, 7)
    assert applied.sources[0] == NumberSet(2_000)


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(DistBeliefError, match="numbered from 0"):
        AppliedChanges().add(0, -1)
