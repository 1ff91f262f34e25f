"""`distbelief chaos`: what it refuses before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distbelief.chaos.rules.schedule import FORMS
from distbelief.cli.chaos import wanted_faults
from distbelief.cli.failures import UsageError
from distbelief.cli.main import app


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "fine.py"
    path.write_text("raise SystemExit('must not run')")
    return path


def chaos(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["chaos", *map(str, arguments)])


def test_a_wrong_sentence_shows_the_place_and_the_forms(job: Path) -> None:
    result = chaos(job, "--faults", "kill worker every 3s, frieze worker 2")
    assert result.exit_code == 2
    first, sentence, caret, *rest = result.stderr.splitlines()
    assert first.startswith("error: the schedule of faults is not understood: 'frieze' is not a fault")
    assert sentence.strip() == "kill worker every 3s, frieze worker 2"
    assert caret.index("^") == sentence.index("frieze")
    assert "\n".join(rest).endswith(FORMS)
    assert not (job.parent / "runs").exists()


def test_with_json_stdout_is_one_object(job: Path) -> None:
    result = chaos(job, "--faults", "explode", "--json")
    assert result.exit_code == 2
    assert list(json.loads(result.stdout)) == ["error"]


def test_a_worker_that_cannot_be(job: Path) -> None:
    result = chaos(job, "--workers", 2, "--faults", "kill worker 2 at step 3")
    assert result.exit_code == 2
    assert "there is no worker 2" in result.stderr
    assert "0 to 1" in result.stderr


def test_the_job_file_is_checked_first(tmp_path: Path) -> None:
    assert "no such job file" in chaos(tmp_path / "absent.py", "--faults", "explode").stderr


def test_an_unknown_strategy(job: Path) -> None:
    result = chaos(job, "--faults", "join", "--strategy", "wishful")
    assert result.exit_code == 2
    assert "unknown strategy 'wishful'" in result.stderr


def test_either_faults_or_random(job: Path) -> None:
    assert "no faults were given" in chaos(job).stderr
    assert "give either --faults or --random" in chaos(job, "--faults", "join", "--random", 2).stderr
    with pytest.raises(UsageError):
        wanted_faults("", 0, 4)
    assert wanted_faults("", 3, 4) == ()
    assert [str(fault) for fault in wanted_faults("join at step 3", 0, 4)] == ["join at step 3"]
