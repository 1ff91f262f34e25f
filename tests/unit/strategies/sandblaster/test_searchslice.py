"""Where a search is: one driver at a time, steps that are done once, and answers that survive a copy."""

from __future__ import annotations

from typing import Any

import pytest

from distbelief.errors import DistBeliefError
from distbelief.strategies.ps.protocol.messages import Inspect, Note, PullValues
from distbelief.strategies.ps.server.stores import Change
from distbelief.strategies.sandblaster.messages import (
    Begin,
    Computed,
    Heard,
    Idle,
    Keep,
    Portions,
    SearchKnown,
    Stepped,
    StepsDone,
    Take,
    Total,
    first_number,
)
from distbelief.strategies.sandblaster.slices import SearchSlice

FIRST, SECOND = first_number(1), first_number(2)


def said(store: SearchSlice, content: Any) -> Any:
    """What the worker is answered."""
    store.apply(Change(content))
    given = store.given(content.worker)
    assert given is not None
    return given.what


def take(worker: int = 5, generation: int = 1, step: int = 0, computed: Computed | None = None) -> Take:
    return Take(generation, worker, step, 0.0, computed)


def known(store: SearchSlice) -> SearchKnown:
    letter = store.reply(Inspect(1, 9), "", True, True)
    assert letter is not None
    assert isinstance(letter.message, SearchKnown)
    return letter.message


def begun() -> SearchSlice:
    store = SearchSlice(portions=2)
    assert said(store, Begin(5, FIRST, 2)) == Heard(True)
    assert said(store, take()) == Idle()  # no point is shown yet
    assert said(store, Begin(5, FIRST + 1, 2, 256)) == Heard(True)
    return store


def test_an_evaluation_from_its_beginning_to_the_end_of_the_step() -> None:
    store = begun()
    assert said(store, take(5)) == Portions(256, FIRST + 1, (0, 1))
    assert said(store, take(6)) == Portions(256, FIRST + 1, (1, 2))
    assert said(store, take(5, computed=Computed(256, (0, 1), [(3.0, 2.0)]))) == Idle()
    assert said(store, take(6, computed=Computed(256, (1, 2), [(4.0, 2.0)]))) == Total(256, 7.0, 4.0)
    assert said(store, Keep(5, FIRST + 2, 1, b"state", 1.75, 100, 8.0)) == Heard(True)
    done = StepsDone(0, 1, 1.75, 100, 8.0)
    assert said(store, take(6)) == Stepped(FIRST + 2, b"state", done)
    assert (known(store).steps, known(store).state, known(store).past) == (1, b"state", [done])


def test_a_driver_that_was_replaced_hears_that_it_does_not_count() -> None:
    store = begun()
    assert said(store, Begin(6, SECOND, 1)) == Heard(True)
    assert said(store, Begin(5, FIRST + 2, 2, 257)) == Heard(False)
    assert said(store, Keep(5, FIRST + 3, 1, b"old", 1.0, 1, 1.0)) == Heard(False)
    assert (known(store).steps, known(store).state) == (0, b"")


def test_members_of_other_generations_are_given_nothing_and_not_believed() -> None:
    """What they have computed may be of sums that the slices have dropped since."""
    store = begun()
    assert said(store, take(generation=2)) == Idle()
    said(store, Begin(6, SECOND, 1))
    said(store, Begin(6, SECOND + 1, 1, 256))
    for node in ((0, 1), (1, 2)):
        assert said(store, take(computed=Computed(256, node, [(1.0, 1.0)]))) == Idle()
    assert said(store, take(6, generation=2)) == Portions(256, SECOND + 1, (0, 1))


def test_a_copy_answers_as_the_original_does() -> None:
    store, copy = begun(), SearchSlice(portions=2)
    said(store, take())
    store.apply(Change(Note(3, b"accuracy")))
    copy.load(store.state())
    assert copy.given(5) == store.given(5)
    assert known(copy) == known(store)
    assert known(copy).note == (3, b"accuracy")
    rest = take(computed=Computed(256, (0, 1), [(1.0, 1.0)]))
    assert said(copy, rest) == said(store, rest) == Portions(256, FIRST + 1, (1, 2))


def test_it_is_answered_from_what_the_backup_has_too() -> None:
    assert begun().reply(Inspect(1, 9), "", True, caught_up=False) is None
    with pytest.raises(DistBeliefError, match="a search does not answer PullValues"):
        begun().reply(PullValues(1, 9, 0), "", True, True)
