"""sandblaster in real runs: the same weights on any number of workers and servers, whoever dies; and resumed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import JOBS, Outcome, Run
from saved_runs import sealed, step, until
from watched import Watched, expect_ours

Cli = Callable[..., Outcome]
Start = Callable[..., Run]
Wait = Callable[[Callable[[], object]], None]

JOB = [JOBS / "logistic.py", "--set", "steps=12", "--set", "every=6"]
SLOW = [*JOB, "--set", "brake_s=0.02"]
STRATEGY = "sandblaster:portion=100"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights, on one worker and one server, when nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    arguments = [*JOB, "--strategy", f"{STRATEGY}:servers=1:tcp", "--workers", 1, "--json"]
    weights: str = Run(folder, "train", *arguments).wait().json["weights_sha256"]
    return weights


def servers(run: Watched) -> dict[int, int]:
    """Server -> process."""
    found = run.journal("servers")
    return {one["number"]: one["pid"] for one in found[-1]["servers"]} if found else {}


def test_a_server_a_worker_and_the_driver_are_killed(
    start: Start, tmp_path: Path, wait_until: Wait, undisturbed: str
) -> None:
    run = Watched(start, tmp_path, wait_until, *SLOW, "--strategy", STRATEGY, "--workers", 3)
    run.after(2)
    victim = servers(run)[0]
    expect_ours(victim)
    os.kill(victim, signal.SIGKILL)
    run.after(4)
    run.signal(2, signal.SIGKILL)
    run.after(6)
    run.signal(0, signal.SIGKILL)
    result = run.result()
    assert result["weights_sha256"] == undisturbed
    assert (result["steps"], result["servers_lost"], result["reexecuted"]) == (12, 1, 0)


def test_stopped_and_resumed_with_other_workers_and_servers(start: Start, tmp_path: Path, undisturbed: str) -> None:
    run = start("train", *SLOW, "--run-dir", "run", "--workers", 2, "--strategy", STRATEGY)
    until(lambda: step(tmp_path / "run") > 4, run)
    run.signal(signal.SIGINT)
    assert run.wait().status == 130
    assert sealed(tmp_path / "run")[0] > 4
    other = f"{STRATEGY}:servers=1"
    result = start("resume", "run", "--workers", 1, "--strategy", other, "--json").wait().json
    assert result["weights_sha256"] == undisturbed
