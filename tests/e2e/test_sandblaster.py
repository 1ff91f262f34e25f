"""sandblaster in real runs: the same weights on any number of workers and servers, whoever dies; and resumed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from distbelief.checkpoint.weights import weights_sha256
from distbelief.strategies.sandblaster.strategy import Sandblaster
from distbelief.verification.plain import make_model
from distbelief.verification.plainlbfgs import train_by_search
from distbelief.worker.jobfile import load_job
from tests.support.runs.command import JOBS, Run
from tests.support.runs.saved import sealed, step, until
from tests.support.runs.watched import Watched, check_servers_lost

Start = Callable[..., Run]
Wait = Callable[[Callable[[], object]], None]

STEPS = 9
JOB = [JOBS / "logistic.py", "--set", f"steps={STEPS}", "--set", "every=6", "--set", "brake_s=0.2"]
STRATEGY = "sandblaster:portion=100"


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """The weights of one plain process."""
    job = load_job(JOBS / "logistic.py", {"steps": str(STEPS)})
    model = make_model(job)
    list(train_by_search(job, model, Sandblaster(portion=100)))
    return weights_sha256(model)


def test_a_server_and_the_driver_are_killed(start: Start, tmp_path: Path, wait_until: Wait, undisturbed: str) -> None:
    run = Watched(start, tmp_path, wait_until, *JOB, "--strategy", STRATEGY, "--workers", 2)
    run.after(2)
    run.signal_server(0, signal.SIGKILL)
    run.after(4)
    run.signal(0, signal.SIGKILL)
    result = run.result()
    assert result["weights_sha256"] == undisturbed
    assert result["steps"] == STEPS
    check_servers_lost(run.folder, result, killed=[0])


def test_stopped_and_resumed_with_other_workers_and_servers(start: Start, tmp_path: Path, undisturbed: str) -> None:
    (tmp_path / "brake").touch()
    run = start("train", *JOB, "--run-dir", "run", "--workers", 2, "--strategy", f"{STRATEGY}:servers=1")
    until(lambda: step(tmp_path / "run") > 2, run)
    run.signal(signal.SIGINT)
    assert run.wait().status == 130
    assert 2 < sealed(tmp_path / "run")[0] < STEPS
    (tmp_path / "brake").unlink()
    result = start("resume", "run", "--workers", 1, "--strategy", f"{STRATEGY}:tcp", "--json").wait().json
    assert result["weights_sha256"] == undisturbed
