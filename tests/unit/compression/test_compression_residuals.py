"""Residuals belong to a state: whatever becomes of a step, the one of the state that it went on from is there."""

from __future__ import annotations

import torch

from distbelief.compression.residuals import Residuals
from distbelief.transport.shm.segment import Segment


def step(residuals: Residuals, number: int, value: float) -> None:
    residuals.begin(number)
    residuals.mark_nonzero()
    residuals.after.fill_(value)
    residuals.mark_complete()


def test_a_step_that_is_taken_again_finds_what_it_found() -> None:
    memory: dict[str, Segment] = {}
    residuals = Residuals(memory, 4)
    step(residuals, 0, 1.0)
    step(residuals, 1, 2.0)
    again = Residuals(memory, 4)  # the next generation, in which nobody had applied step 1
    assert again.begin(1)
    assert again.before.tolist() == [1.0] * 4


def test_a_member_that_had_not_applied_a_step_has_what_goes_with_it_when_others_had() -> None:
    memory: dict[str, Segment] = {}
    residuals = Residuals(memory, 4)
    step(residuals, 0, 1.0)
    step(residuals, 1, 2.0)
    again = Residuals(memory, 4)
    assert again.begin(2)
    assert again.before.tolist() == [2.0] * 4


def test_a_torn_one_is_never_used() -> None:
    memory: dict[str, Segment] = {}
    residuals = Residuals(memory, 4)
    step(residuals, 0, 1.0)
    residuals.begin(1)
    residuals.after[:2] = 7.0  # and the member is called away
    again = Residuals(memory, 4)
    assert not again.begin(2)
    assert again.before.tolist() == [0.0] * 4


def test_a_member_that_was_away_begins_with_none() -> None:
    memory: dict[str, Segment] = {}
    step(Residuals(memory, 4), 0, 1.0)
    later = Residuals(memory, 4)
    assert not later.begin(9)
    assert later.before.tolist() == [0.0] * 4
    assert later.at(9) is not None
    assert later.at(10) is None


def test_what_is_released_is_gone_and_what_lies_further_stays() -> None:
    residuals = Residuals({}, 4, further=2)
    residuals.begin(0)
    residuals.mark_nonzero()
    residuals.after.copy_(torch.arange(6.0))
    residuals.mark_complete()
    for number, there in [(1, True), (2, False), (3, False)]:
        residuals.begin(number)
        assert residuals.release() is there
        residuals.mark_complete()
        assert residuals.after.tolist() == [0.0] * 4 + [4.0, 5.0]


def test_what_was_released_and_not_used_is_kept() -> None:
    residuals = Residuals({}, 4)
    step(residuals, 0, 3.0)
    residuals.begin(1)
    residuals.release()
    residuals.mark_complete()
    residuals.keep(slice(1, 3))
    residuals.begin(2)
    assert residuals.before.tolist() == [0.0, 3.0, 3.0, 0.0]
    assert residuals.release(), "it is known not to be zero"


def test_one_that_is_put_belongs_to_its_state_alone() -> None:
    residuals = Residuals({}, 3)
    step(residuals, 0, 1.0)
    residuals.put(7, torch.tensor([1.0, 2.0, 3.0]))
    assert residuals.begin(7)
    assert residuals.before.tolist() == [1.0, 2.0, 3.0]
    assert not residuals.begin(1)


def test_traffic_is_counted_over_generations() -> None:
    memory: dict[str, Segment] = {}
    Residuals(memory, 3).count(10, 40)
    Residuals(memory, 3).count(1, 4)
    assert Residuals(memory, 3).traffic == (11, 44)
