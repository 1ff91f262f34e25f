"""Plug-ins with ordinary mistakes: each is one error that names the entry point and its distribution."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distbelief import strategies
from distbelief.errors import JobError
from distbelief.strategies import UnknownStrategy, import_sides, parse, plugin, require
from tests.support.plugins import describe

VALUE = """
from dataclasses import dataclass
from distbelief.strategies.base import Strategy


@dataclass(frozen=True)
class Vote(Strategy):
    exact = True
    transport = "auto"

    def __str__(self):
        return "vote"


def parse(text, options):
    return Vote()
"""

Add = Callable[..., None]


def forget() -> None:
    parse.cache_clear()
    strategies._entry_point.cache_clear()


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Add]:
    """Install a distribution with one entry point, `name = value`, and perhaps the module plugged/vote.py."""
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "plugged"
    package.mkdir()
    (package / "__init__.py").touch()

    def install(name: str, value: str, code: str | None = None, distribution: str = "distbelief-vote") -> None:
        describe(tmp_path, distribution, "1.0", {strategies.GROUP: {name: value}})
        if code is not None:
            (package / "vote.py").write_text(code)

    forget()
    yield install
    forget()
    for module in [module for module in sys.modules if module.partition(".")[0] == "plugged"]:
        del sys.modules[module]


def refused(text: str) -> JobError:
    with pytest.raises(JobError) as raised:
        parse(text)
    assert not isinstance(raised.value, UnknownStrategy)
    return raised.value


def test_a_sound_plugin(add: Add) -> None:
    add("vote", "plugged.vote", VALUE)
    assert type(parse("vote")).__name__ == "Vote"
    assert require("vote", plugin("vote")) == parse("vote")
    assert plugin("vote") == "distbelief-vote==1.0"


def test_the_version_is_that_of_the_code_in_use(add: Add, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add("vote", "plugged.vote", VALUE)
    parse("vote")
    other = tmp_path / "other"
    other.mkdir()
    describe(other, "distbelief-vote", "2.0", {strategies.GROUP: {"vote": "plugged.vote"}})
    monkeypatch.syspath_prepend(other)
    assert plugin("vote") == "distbelief-vote==1.0"
    forget()
    assert plugin("vote") == "distbelief-vote==2.0"


def test_an_unknown_name(add: Add) -> None:
    add("vote", "plugged.vote", VALUE)
    with pytest.raises(UnknownStrategy, match="unknown strategy 'votes'") as raised:
        parse("votes")
    assert raised.value.hint.startswith("known strategies: vote, allreduce, ")
    assert raised.value.details == ""


@pytest.mark.parametrize("module", ["plugged.veto", "nowhere", "nowhere.vote"])
def test_a_module_that_does_not_exist(add: Add, module: str) -> None:
    add("vote", module)
    error = refused("vote")
    missing = "nowhere" if module.startswith("nowhere") else module
    assert error.message == (
        f"the entry point 'vote = {module}' of distbelief-vote==1.0 (group distbelief.strategies) cannot be used: "
        f"there is no module '{missing}'"
    )
    assert (error.hint, error.details) == ("install the distribution again, or mend its entry point", "")


@pytest.mark.parametrize("value", ["plugged.vote:Vote", "plugged.vote:parse", "plugged vote", "plugged/vote.py", ""])
def test_a_value_that_is_no_module(add: Add, value: str) -> None:
    add("vote", value, VALUE)
    error = refused("vote")
    assert f"'vote = {value}' of distbelief-vote==1.0" in error.message
    assert "its value is not the name of a module" in error.message
    assert "vote = vote.strategy" in error.hint


@pytest.mark.parametrize("code", ["", "parse = 3"])
def test_a_module_without_a_parser(add: Add, code: str) -> None:
    add("vote", "plugged.vote", code)
    error = refused("vote")
    assert "'vote = plugged.vote' of distbelief-vote==1.0" in error.message
    assert "its module has no function parse(text, options)" in error.message
    assert error.details == ""


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def load():\n    raise RuntimeError('no licence')\nload()", "raised on import RuntimeError: no licence"),
        ("import no_such_package", "raised on import ModuleNotFoundError: No module named 'no_such_package'"),
        ("def parse(:", "raised on import SyntaxError: "),
        (
            "def parse(text, options):\n    return {}['majority']",
            "its parse(text, options) raised KeyError: 'majority'",
        ),
    ],
)
def test_a_plugin_that_raises(add: Add, code: str, message: str) -> None:
    add("vote", "plugged.vote", code)
    error = refused("vote")
    assert "the entry point 'vote = plugged.vote' of distbelief-vote==1.0" in error.message
    assert message in error.message
    assert "plugged/vote.py" in error.details, "the plug-in's own frames"
    assert str(Path(strategies.__file__)) not in error.details
    assert "importlib" not in error.details


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (None, "there is no module 'plugged.voting'"),
        ("", "its module plugged.voting has no function prepare"),
        ("raise RuntimeError('no licence')", "its module plugged.voting raised on import RuntimeError: no licence"),
    ],
)
def test_a_workers_side_that_cannot_be_imported(add: Add, tmp_path: Path, code: str | None, message: str) -> None:
    add(
        "vote", "plugged.vote", VALUE.replace("    exact = True", "    on_workers = 'plugged.voting'\n    exact = True")
    )
    if code is not None:
        (tmp_path / "plugged" / "voting.py").write_text(code)
    with pytest.raises(JobError) as raised:
        import_sides("vote")
    assert message in raised.value.message
    assert "the entry point 'vote = plugged.vote' of distbelief-vote==1.0" in raised.value.message
    assert ("plugged/voting.py" in raised.value.details) == bool(code)


def test_a_mistake_in_the_plugins_options_is_the_plugins_own_error(add: Add) -> None:
    add(
        "vote",
        "plugged.vote",
        "from distbelief.errors import JobError\ndef parse(text, options):\n    raise JobError('?')",
    )
    assert refused("vote:fast").message == "?"


def test_a_parser_that_returns_something_else(add: Add) -> None:
    add("vote", "plugged.vote", "def parse(text, options):\n    return text")
    assert "of the type str, not a Strategy" in refused("vote").message


def test_a_value_without_a_string_form(add: Add) -> None:
    add("vote", "plugged.vote", VALUE.replace("__str__", "shown"))
    error = refused("vote")
    assert "'vote = plugged.vote' of distbelief-vote==1.0" in error.message
    assert "the string form of its value, 'Vote()', is none that it can parse" in error.message
    assert "__str__" in error.hint


def test_two_plugins_of_one_name(add: Add) -> None:
    add("vote", "plugged.vote", VALUE)
    add("vote", "plugged.veto", distribution="other-vote")
    for ask in (parse, plugin):
        with pytest.raises(JobError) as raised:
            ask("vote")
        assert raised.value.message == (
            "several entry points of the group distbelief.strategies have the name 'vote': "
            "distbelief-vote==1.0 (vote = plugged.vote) and other-vote==1.0 (vote = plugged.veto)"
        )
        assert raised.value.hint == "uninstall all of these distributions but one"


@pytest.mark.parametrize("name", ["allreduce", "ps", "dp2.tp2", "pp2"])
def test_a_plugin_with_the_name_of_our_own_strategy(add: Add, name: str) -> None:
    add(name, "plugged.vote", VALUE)
    error = refused(name)
    assert error.message == (
        f"the entry point '{name} = plugged.vote' of distbelief-vote==1.0 (group distbelief.strategies) has the name "
        "of a strategy of DistBelief's own"
    )
    assert "give the entry point another name" in error.hint
    parse("local_sgd:8")  # other names are not concerned
