"""A strategy from outside of the package, by entry point: signSGD with majority vote (tests/plugins/signsgd)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.plugins import install
from tests.support.runs.command import JOBS, Outcome, Run

Cli = Callable[..., Outcome]
Start = Callable[..., Run]
Wait = Callable[[Callable[[], Any]], None]

JOB = [JOBS / "served.py", "--set", "steps=60"]
SIGNSGD = [*JOB, "--strategy", "signsgd", "--json"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    install("signsgd", folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def test_the_same_weights_on_any_number_of_workers(distbelief: Cli, installed: Path) -> None:
    found = [distbelief("train", *SIGNSGD, "--workers", workers).json for workers in (1, 2, 3)]
    assert len({one["weights_sha256"] for one in found}) == 1
    assert distbelief("train", *JOB, "--json").json["weights_sha256"] != found[0]["weights_sha256"]


def test_a_worker_is_killed(distbelief: Cli, installed: Path) -> None:
    faults = ["--faults", "kill worker 1 at step 20", "--workers", 2]
    job = [JOBS / "served.py", "--set", "steps=200", "--strategy", "signsgd"]
    found = distbelief("chaos", *job, *faults, "--json").json
    assert all(one["weights_equal"] and one["steps_lost"] == 0 for one in found["schedules"])


def test_a_host_without_the_plugin_is_refused_with_its_name(
    distbelief: Cli, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    _ = distbelief("train", *SIGNSGD, "--workers", 1, "--run-dir", run_dir).json
    assert json.loads((run_dir / "launch.json").read_text())["plugin"] == "distbelief-signsgd==0.1"
    monkeypatch.delenv("PYTHONPATH")
    for command in (["resume", run_dir], ["replay", run_dir, "--step", 3]):
        outcome = distbelief(*command)
        assert outcome.status != 0
        assert "has no strategy 'signsgd'" in outcome.stderr
        assert "pip install distbelief-signsgd==0.1" in outcome.stderr
    unknown = distbelief("train", *SIGNSGD)
    assert unknown.status == 2
    assert "unknown strategy 'signsgd'" in unknown.stderr + unknown.stdout
