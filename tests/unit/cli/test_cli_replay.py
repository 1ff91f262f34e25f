"""`distbelief replay`: what it refuses before it starts anew, and what it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distbelief.cli import replay as command
from distbelief.cli.main import app
from distbelief.launch.processes import WORKER_ENVIRONMENT


def replay(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def test_a_run_that_does_not_exist(tmp_path: Path) -> None:
    result = replay(tmp_path / "absent", "--step", 3, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"error": f"there is no run directory {tmp_path / 'absent'}"}
    assert "launch.json" in replay(tmp_path).stderr


def test_a_debugger_cannot_print_json(tmp_path: Path) -> None:
    result = replay(tmp_path, "--debug", "--json")
    assert result.exit_code == 2
    assert "do not go together" in result.stderr


@pytest.mark.parametrize("option", ["--step", "--shard"])
def test_numbers_that_cannot_be(tmp_path: Path, option: str) -> None:
    assert replay(tmp_path, option, -1).exit_code == 2


def test_it_starts_anew_in_the_environment_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(command.os, "execve", lambda *call: started.append(call))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    command._start_as_workers_do(Path("-x"), 0, 2, debug=True, device="cpu", json=False)
    ((program, arguments, environment),) = started
    assert program == arguments[0] == sys.executable
    assert arguments[-7:] == ["replay", "--step=0", "--shard=2", "--device=cpu", "--debug", "--", "-x"]
    assert environment == {**os.environ, "PYTHONHASHSEED": "0", **WORKER_ENVIRONMENT}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    command._start_as_workers_do(Path("x"), None, None, debug=False, device="", json=True)
    assert len(started) == 1, "once is enough"


def test_the_checks_need_no_torch(tmp_path: Path) -> None:
    code = """
import sys
from distbelief.cli.main import app
try:
    app(["replay", sys.argv[1]], standalone_mode=False)
finally:
    print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=300)
    assert "launch.json" in done.stderr
    assert done.stdout.splitlines()[-1] == "False"
