"""How users say when to save and what to keep."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distbelief.errors import DistBeliefError
from distbelief.launch.rules.saveplan import DEFAULT_EVERY, best, interval


@pytest.mark.parametrize(
    ("text", "steps", "seconds"),
    [
        ("1", 1, 0.0),
        ("500", 500, 0.0),
        ("30s", 0, 30.0),
        ("0.5s", 0, 0.5),
        ("10m", 0, 600.0),
        ("2h", 0, 7200.0),
        (" 10M ", 0, 600.0),
        ("end", 0, 0.0),
        ("END", 0, 0.0),
    ],
)
def test_a_number_of_steps_or_a_time_or_the_end(text: str, steps: int, seconds: float) -> None:
    assert interval(text) == (steps, seconds)


def test_never_is_not_even_at_the_end() -> None:
    assert interval("never") is None


def test_what_is_meant_when_nothing_is_said_can_be_said() -> None:
    assert interval(DEFAULT_EVERY) == (0, 600.0)


@pytest.mark.parametrize("text", ["", "0", "-5", "0s", "0.0h", "5 m", "5d", "m", "1e3", "½", "10ms", "often", "1m30s"])
def test_anything_else_is_an_error_that_shows_what_can_be_said(text: str) -> None:
    with pytest.raises(DistBeliefError, match="how often to save") as caught:
        interval(text)
    assert repr(text) in caught.value.message
    assert all(word in caught.value.hint for word in ("500", "30s", "end", "never"))


@given(st.text(max_size=8))
def test_no_text_is_worse_than_an_error_in_words(text: str) -> None:
    try:
        found = interval(text)
    except DistBeliefError:
        return
    assert found is None or min(found) == 0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ("accuracy", ("accuracy", True)),
        ("f1:max", ("f1", True)),
        ("loss", ("loss", False)),
        ("training_loss", ("training_loss", False)),
        ("Top1Error", ("Top1Error", False)),
        ("perplexity", ("perplexity", False)),
        ("loss:max", ("loss", True)),
        ("accuracy:min", ("accuracy", False)),
    ],
)
def test_the_best_is_the_lowest_of_losses_and_errors_and_the_highest_of_the_rest(text: str, found: object) -> None:
    assert best(text) == found


@pytest.mark.parametrize("text", [":min", "accuracy:best", "a:b:min"])
def test_another_order_is_an_error(text: str) -> None:
    with pytest.raises(DistBeliefError, match="what the best checkpoint is"):
        best(text)
