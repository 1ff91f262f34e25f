"""Runs on a real Ray cluster of several raylets."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.runs.command import JOBS, Outcome, Run
from tests.support.runs.raycluster import RayCluster
from tests.support.runs.watched import Watched

SMALL = JOBS / "small.py"
STEPS = 400  # of 0.4 s: the run outlasts the start of a node


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A head and two nodes for two workers each."""
    cluster = RayCluster(nodes=2)
    yield cluster
    cluster.close()


@pytest.fixture
def clean(cluster: RayCluster, wait_until: Callable[..., None]) -> Iterator[RayCluster]:
    """After the test nothing of a run may be left in the cluster."""
    yield cluster
    wait_until(lambda: not cluster.left_behind())
    cluster.wait_until_deaths_are_known()


def test_a_run_survives_its_coordinator_and_a_node_and_grows_back(
    clean: RayCluster,
    start: Callable[..., Run],
    distbelief: Callable[..., Outcome],
    tmp_path: Path,
    wait_until: Callable[..., None],
) -> None:
    settings = ("--set", f"steps={STEPS}", "--workers", 4)
    run = Watched(start, tmp_path, wait_until, SMALL, *settings, "--set", "brake_s=0.4", "--on", f"ray:{clean.address}")
    run.after(2)
    assert len({member["host"] for member in run.journal("generation")[-1]["members"]}) == 2

    (coordinator,) = clean.actors("CoordinatorActor")
    coordinator.kill()
    run.wait_until(lambda: len(run.journal("epoch")) == 2)
    run.after(run.step() + 1)

    clean.kill_node_of(clean.actors("AgentActor")[0])
    run.wait_until(lambda: len(run.members()) == 2)
    run.after(run.step() + 1)

    clean.add_node()
    run.has_members(4)
    result = run.result()
    assert result["steps"] == STEPS
    assert result["workers"] == 4
    twin = distbelief("train", SMALL, *settings, "--run-dir", "twin", "--json").json
    assert result["weights_sha256"] == twin["weights_sha256"]


def test_ctrl_c_ends_everything_and_a_cluster_that_is_too_small_is_named(
    clean: RayCluster, start: Callable[..., Run], tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    on = ("--on", f"ray:{clean.address}")
    outcome = start("train", SMALL, "--workers", 99, *on).wait()
    assert outcome.status == 1
    assert "the Ray cluster has 4 CPUs on 3 nodes; 99 workers want 99" in outcome.stderr
    endless = ("--set", "steps=5000", "--set", "brake_s=0.1")
    run = Watched(start, tmp_path, wait_until, SMALL, "--workers", 2, *endless, *on)
    run.after(1)
    agents = clean.actors("AgentActor")
    assert len(agents) == 1, "both workers are on one node"
    run.run.signal(signal.SIGINT)
    outcome = run.run.wait()
    assert outcome.status == 128 + signal.SIGINT
    assert "the newest checkpoint is of step" in outcome.stderr
    assert not any(os.path.exists(f"/proc/{agent.pid}") and agent.is_running() for agent in agents)
