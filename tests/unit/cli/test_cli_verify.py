"""`distbelief verify`: what it refuses before anything is started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distbelief.cli.main import app
from distbelief.verification.compare import TOLERANCE_BF16, TOLERANCE_FP32


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "fine.py"
    path.write_text("raise SystemExit('must not run')")
    return path


def verify(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


@pytest.mark.parametrize("option", ["--strategy", "--against"])
def test_an_unknown_strategy(job: Path, option: str) -> None:
    result = verify(job, option, "wishful", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {"error": "unknown strategy 'wishful'"}


def test_the_job_file_and_settings_are_checked(job: Path, tmp_path: Path) -> None:
    assert "no such job file" in verify(tmp_path / "absent.py").stderr
    assert "not of the form name=value" in verify(job, "--set", "steps").stderr


@pytest.mark.parametrize("option", ["--steps", "--workers", "--tolerance"])
def test_numbers_that_cannot_be(job: Path, option: str) -> None:
    assert verify(job, option, -1).exit_code == 2


def test_help_names_the_tolerances_and_needs_no_torch() -> None:
    code = """
import sys
from distbelief.cli.main import app
app(["verify", "--help"], standalone_mode=False)
sys.exit(f"imported torch" if "torch" in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [float("1e-4"), float("2e-2")] == [TOLERANCE_FP32, TOLERANCE_BF16]
    assert "1e-4" in done.stdout
    assert "2e-2" in done.stdout
