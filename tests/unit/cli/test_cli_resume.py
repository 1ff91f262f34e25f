"""`distbelief resume`: what it refuses before it starts anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distbelief.cli.main import app
from distbelief.coordinator.journal import Journal
from distbelief.launch.launch import Launch, keep_launch
from distbelief.options import RunOptions


def resume(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["resume", *map(str, arguments)])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    keep_launch(Launch(folder, RunOptions(2, "allreduce")))
    return folder


@pytest.mark.parametrize("new", [[], ["--run-dir", "new"]])
def test_what_is_no_run_directory(new: list[str], tmp_path: Path) -> None:
    there = tmp_path / "there"
    done = resume(there, *new)
    assert (done.exit_code, f"there is no {there}" in done.output) == (1, True)
    there.mkdir()
    assert "is no run directory: there is no launch.json in it" in resume(there, *new).output
    (there / "step-000000005").mkdir()
    done = resume(there, *new)
    assert f"{there} holds checkpoints, but no run.json" in done.output
    assert "--from" in done.output


def test_a_run_directory_is_the_only_place_where_its_run_continues(run: Path) -> None:
    assert f"{run} is a run directory, and the run continues in it" in resume(run, "--run-dir", "new").output


def test_a_damaged_file_is_all_that_is_told_of_a_complete_run(run: Path) -> None:
    with Journal.open(run / "journal.jsonl") as journal:
        journal.append({"kind": "ended", "status": "completed", "reason": "x"})
    (run / "launch.json").write_text("{")
    done = resume(run, "--json")
    assert done.exit_code == 1
    assert "is complete" not in done.output
    assert "launch.json is damaged" in json.loads(done.stdout)["error"]
    assert "distbelief resume CHECKPOINTS --run-dir NEW" in done.stderr


def test_a_log_that_cannot_be_made_is_one_error(run: Path) -> None:
    (run / "logs").touch()
    done = resume(run, "--detach")
    assert done.exit_code == 1
    assert f"cannot write {run}/logs/command.log: File exists" in done.output
