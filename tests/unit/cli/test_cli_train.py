"""`distbelief train`: what it refuses before anything is started."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distbelief.cli import train as train_module
from distbelief.cli.failures import UsageError
from distbelief.cli.main import app
from distbelief.cli.train import check_job_file, parse_settings, parse_shares
from distbelief.errors import JobError


def train(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def test_a_missing_file_suggests_close_names(tmp_path: Path) -> None:
    (tmp_path / "digits.py").write_text("")
    result = train(tmp_path / "digit.py")
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: no such job file: {tmp_path / 'digit.py'}\nwhat to do: try {tmp_path / 'digits.py'}\n"
    )
    assert f"try {tmp_path / 'digits.py'}" in train(tmp_path / "digits").stderr


def test_a_missing_file_without_close_names(tmp_path: Path) -> None:
    assert "distbelief new" in train(tmp_path / "zebra.py").stderr
    assert f"no folder {tmp_path / 'nowhere'}" in train(tmp_path / "nowhere" / "x.py").stderr


def test_a_folder_and_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("")
    folder = train(tmp_path)
    assert folder.exit_code == 2
    assert "is a folder" in folder.stderr
    assert f"try {tmp_path / 'b.py'}" in folder.stderr
    (tmp_path / "job.yaml").write_text("")
    other = train(tmp_path / "job.yaml")
    assert other.exit_code == 2
    assert "is not a Python file" in other.stderr


def test_a_syntax_error_shows_line_and_caret_and_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("print('this must not run')\ndef job(:\n    pass\n")
    result = train(path)
    assert result.exit_code == 2
    first, *rest = result.stderr.splitlines()
    assert first.startswith(f"error: syntax error in {path}, line 2: ")
    assert any("def job(:" in line for line in rest)
    assert any(line.strip().strip("^") == "" and "^" in line for line in rest)
    assert result.stdout == ""


def test_with_json_stdout_is_one_object(tmp_path: Path) -> None:
    result = train(tmp_path / "absent.py", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {"error": f"no such job file: {tmp_path / 'absent.py'}"}
    assert result.stderr.startswith("error: no such job file")


@pytest.mark.parametrize("text", ["lr", "=3", "2x=3", "a b=3", ""])
def test_ill_formed_settings(tmp_path: Path, text: str) -> None:
    path = tmp_path / "fine.py"
    path.write_text("")
    result = train(path, "--set", text)
    assert result.exit_code == 2
    assert "is not of the form name=value" in result.stderr


def test_degrees_that_do_not_fit_the_workers_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "fine.py"
    path.write_text("raise AssertionError('this must not run')")
    result = train(path, "--strategy", "pipeline:2", "--workers", 3, "--run-dir", tmp_path / "run")
    assert result.exit_code == 2
    assert "pipeline:2 takes a multiple of 2 workers, not 3: use --workers 2 or 4, or pipeline:3" in result.stderr
    assert not (tmp_path / "run").exists()


def test_settings_are_texts_and_the_last_wins() -> None:
    assert parse_settings(["lr=1", " lr = 3e-4 ", "note=a=b", "empty="]) == {"lr": "3e-4", "note": "a=b", "empty": ""}


def test_shares() -> None:
    assert parse_shares("2, 1,1.5", 3) == [2.0, 1.0, 1.5]
    for text in ("2,,1", "a", "1,0", "1,-1", "nan", "inf,1"):
        with pytest.raises(UsageError, match="not a list of numbers above 0"):
            parse_shares(text, None)
    with pytest.raises(UsageError, match="2 shares for 3 workers"):
        parse_shares("1,1", 3)


def test_a_good_file_is_not_run_by_the_check(tmp_path: Path) -> None:
    path = tmp_path / "good.py"
    path.write_text("raise SystemExit('must not run')")
    check_job_file(path)
    with pytest.raises(JobError):
        check_job_file(tmp_path / "bad.py")


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(train_module).failed == 0
