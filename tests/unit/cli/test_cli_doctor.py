"""`distbelief doctor` as it is typed. What it finds on several hosts is in e2e."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from distbelief.cli.main import app
from distbelief.control.keyfiles import new_key
from distbelief.doctor import connection


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--join", "a:1", "--listen", "b"], "--join and --listen are for different hosts"),
        (["--listen", "127.0.0.1"], "--listen needs --key FILE"),
    ],
)
def test_what_cannot_be_done(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 2
    assert complaint in result.output
    assert "what to do:" in result.output


def test_a_report_for_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens there: that is found, beside what is found on this machine; and it is no success."""
    monkeypatch.setattr(connection, "PATIENCE_S", 0.0)
    new_key(tmp_path / "key")
    where = ["--join", "127.0.0.2:1", "--key", str(tmp_path / "key"), "--run-dir", str(tmp_path)]
    result = CliRunner().invoke(app, ["doctor", *where])
    assert result.exit_code == 1
    assert f"{tmp_path}: " in result.output
    assert "PROBLEM  connection" in result.output
    assert "refused the connection" in result.output
    assert result.output.splitlines()[-1].endswith(("problem", "problems"))
