"""Views of runs from their files: the end, an end that is missing, and readers that go."""

from __future__ import annotations

import json
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


def test_a_stop_that_waits_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    write_metrics(tmp_path, {"kind": "notice", "text": "of before", "at": 1.0})
    waiting = attach.Waiting(tmp_path, said.append)
    notices = ["SIGTERM received: the run stops when a checkpoint is saved", "step 3 is not saved"]
    write_metrics(tmp_path, *({"kind": "notice", "text": text, "at": 2.0} for text in notices))
    assert not waiting.look()
    assert said == ["step 3 is not saved"]
    monkeypatch.setattr(attach, "SILENT_S", 0.0)
    monkeypatch.setattr(attach, "_ROOM_BYTES", 1 << 80)
    for _ in range(2):
        waiting.look()
    assert said[1:] == [
        f"the run has not ended yet: the disk of {tmp_path} has no room, free some space; Ctrl-C ends this command only"
    ]


def write_metrics(run_dir: Path, *lines: dict[str, object]) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
