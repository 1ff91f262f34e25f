"""`distbelief scale`: what is asked for, and of whom."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from distbelief.cli.main import app
from distbelief.control.messages import Answer, Event, ScaleRequested, ServersRequested
from distbelief.coordinator import client


def scale(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["scale", *map(str, arguments)])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What reaches a coordinator that takes any number of workers, and up to 3 servers."""
    found: list[Event] = []

    def ask(run_dir: Path, event: Event) -> Answer:
        found.append(event)
        return Answer(1, not isinstance(event, ServersRequested) or event.servers <= 3, f"answer {len(found)}")

    monkeypatch.setattr(client, "ask", ask)
    return found


def test_workers_servers_or_both(asked: list[Event]) -> None:
    assert scale("run", 4).stdout == "answer 1\n"
    assert json.loads(scale("run", "--servers", 3, "--json").stdout) == {"servers": 3, "text": "answer 2"}
    assert scale("run", 2, "--servers", 1).stdout == "answer 3; answer 4\n"
    assert asked == [ScaleRequested(4), ServersRequested(3), ScaleRequested(2), ServersRequested(1)]


def test_what_is_refused_is_an_error_and_says_what_was_done_before(asked: list[Event]) -> None:
    refused = scale("run", 2, "--servers", 9)
    assert refused.exit_code == 1
    assert "answer 1; answer 2" in refused.stderr


def test_without_a_number_it_says_how_to_give_one(asked: list[Event]) -> None:
    nothing = scale("run")
    assert (nothing.exit_code, "--servers 3" in nothing.stderr) == (2, True)
    assert scale("run", "--servers", 0).exit_code == 2
    assert asked == []
