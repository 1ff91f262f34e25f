"""`distbelief keys`, and the option by which other commands take a key file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distbelief.cli.keys import key_file
from distbelief.cli.main import app
from distbelief.control.keyfiles import new_key, read_key
from distbelief.errors import DistBeliefError


def run(*arguments: object, **environment: str) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)), env=environment)


def test_a_key_is_made_and_checked_and_never_shown(tmp_path: Path) -> None:
    made = run("keys", "new", tmp_path / "key")
    checked = run("keys", "check", tmp_path / "key")
    assert (made.exit_code, checked.exit_code) == (0, 0)
    key = read_key(tmp_path / "key").hex()
    assert key not in made.output + checked.output
    assert "is a key" in checked.output


def test_what_is_wrong_is_said_and_nothing_is_written(tmp_path: Path) -> None:
    new_key(tmp_path / "key")
    kept = (tmp_path / "key").read_text()
    again = run("keys", "new", tmp_path / "key")
    assert (again.exit_code, (tmp_path / "key").read_text()) == (1, kept)
    assert "exists already" in again.output
    (tmp_path / "key").chmod(0o644)
    shown = run("keys", "check", tmp_path / "key")
    assert shown.exit_code == 1
    assert "can be read by others" in shown.output
    assert kept.strip() not in shown.output


@pytest.mark.parametrize("by", ["option", "environment"])
def test_a_run_is_not_started_with_a_bad_key(tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text("job = None\n")
    (tmp_path / "key").write_text("short")
    (tmp_path / "key").chmod(0o600)
    if by == "option":
        outcome = run("train", "job.py", "--key", "key")
    else:
        outcome = run("train", "job.py", DISTBELIEF_KEY_FILE="key")
    assert outcome.exit_code == 1
    assert "holds no key" in outcome.output
    assert not (tmp_path / "runs").exists()


def test_a_run_remembers_where_its_key_is_not_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    new_key(tmp_path / "key")
    assert key_file(Path("key")) == str(tmp_path / "key")
    assert key_file(None) == ""
    with pytest.raises(DistBeliefError):
        key_file(Path("nowhere"))
