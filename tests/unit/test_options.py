"""The options of a run: their declarations, their checks, and the texts for when to save and what to keep."""

from __future__ import annotations

import inspect

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from distbelief.api import train
from distbelief.cli.main import app
from distbelief.errors import DistBeliefError
from distbelief.options import Option, RunOptions, best, declared_options, interval


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


@pytest.mark.parametrize("option", ["checkpoints", "begin_from"])
def test_a_password_in_a_url_is_refused_and_not_repeated(option: str) -> None:
    with pytest.raises(DistBeliefError) as caught:
        RunOptions(1, "allreduce", **{option: "sftp://me:hunter2@store/run"})  # type: ignore[arg-type]
    assert "sftp://me:…@store/run has a password in it" in caught.value.message
    assert "hunter2" not in caught.value.message + caught.value.hint
    assert "FSSPEC_SFTP_PASSWORD" in caught.value.hint


def test_never_is_not_even_at_the_end() -> None:
    assert interval("never") is None


def test_what_is_meant_when_nothing_is_said_can_be_said() -> None:
    assert interval(RunOptions(1, "allreduce").save_every) == (0, 600.0)


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


# --- the value -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 0}, "workers must be at least 1, not 0"),
        ({"threads": 0}, "threads must be at least 1, not 0"),
        ({"min_workers": 0}, "min_workers must be at least 1, not 0"),
        ({"min_workers": 3}, r"min_workers must be from 1 to the number of workers \(2\), not 3"),
        ({"stuck_after_s": 0.5}, "stuck_after_s must be at least 1, not 0.5"),
        ({"stuck_after_s": float("nan")}, "stuck_after_s must be at least 1, not nan"),
        ({"keep_last": 0}, "keep_last must be at least 1, not 0"),
        ({"keep_every": -1}, "keep_every must be at least 0, not -1"),
        ({"shares": (1.0,)}, "1 shares for 2 workers"),
        ({"shares": (1.0, 0.0)}, r"every share must be a finite number above 0, not \[1.0, 0.0\]"),
        ({"shares": (1.0, float("inf"))}, "every share must be a finite number above 0"),
        ({"save_every": "often"}, "'often' does not say how often to save"),
        ({"keep_best": ":min"}, "':min' does not say what the best checkpoint is"),
        ({"recheck": "often"}, "'often' does not say how often to recheck"),
        ({"recheck": "0"}, "'0' does not say how often to recheck"),
        ({"profile": "20:10"}, "'20:10' does not say which steps to profile"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_in_one_place(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DistBeliefError, match=message):
        RunOptions(**{"workers": 2, "strategy": "allreduce", **changes})  # type: ignore[arg-type]


def test_every_option_is_declared_with_a_help_text() -> None:
    for name, declared in declared_options().items():
        assert isinstance(declared.option, Option)
        assert declared.option.help.endswith("."), name


def test_train_takes_every_option_as_a_keyword_argument_with_the_same_default() -> None:
    parameters = inspect.signature(train).parameters
    for name, declared in declared_options().items():
        if name in ("workers", "strategy", "most_steps", "profile"):  # chosen, named or written otherwise
            continue
        assert parameters[name].default == declared.default, name


def test_the_command_line_has_a_flag_for_every_option() -> None:
    command = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    flags = {flag for parameter in command.params for flag in parameter.opts}
    wanted = {declared.option.flag or f"--{name.replace('_', '-')}" for name, declared in declared_options().items()}
    assert wanted - flags == {"--most-steps"}, "only `verify` sets it"
