"""Views of runs from their files: the end, an end that is missing, and readers that go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distbelief.cli import attach
from distbelief.cli.main import app
from distbelief.errors import DistBeliefError
from distbelief.launch.growing import History
from tests.support.coordinator.journals import write


def test_a_run_whose_processes_are_gone_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "GONE_S", 0.3)
    write(tmp_path, {"kind": "epoch", "at": 3.0})
    history = History(tmp_path)
    with pytest.raises(DistBeliefError, match="is not running, and did not end in order"):
        attach.until_the_end(tmp_path, history)


def test_what_is_no_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["attach", str(tmp_path)])
    assert (done.exit_code, "is no run directory" in done.output) == (1, True)


def test_a_reader_that_has_gone_is_noticed() -> None:
    read, write = os.pipe()
    with open(write, "w") as stream:
        assert not attach.has_no_reader(stream)
        os.close(read)
        assert attach.has_no_reader(stream)
