"""Tables on parameter servers: the same rows on any number of workers and servers, whoever dies; each counted once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.support.runs.command import JOBS, Run
from tests.support.runs.saved import check_whole
from tests.support.runs.watched import Watched, expect_ours

Start = Callable[..., Run]
Wait = Callable[[Callable[[], object]], None]
JOB = JOBS / "tables.py"


def kill_a_server(run: Watched) -> None:
    servers = {one["number"]: one["pid"] for one in run.journal("servers")[-1]["servers"]}
    victim = servers[min(servers)]
    expect_ours(victim)
    os.kill(victim, signal.SIGKILL)


def test_the_same_rows_whoever_dies_also_when_resumed_by_others(start: Start, tmp_path: Path, wait_until: Wait) -> None:
    """One run loses a server that has a backup, is stopped, and goes on with others; one loses its only server."""
    job = [JOB, "--set", "brake_s=0.2"]
    run = Watched(start, tmp_path, wait_until, *job, "--strategy", "ps:sync", "--workers", 3)
    run.after(10)
    kill_a_server(run)
    run.after(20)
    run.run.signal(signal.SIGINT)
    assert run.run.wait().status == 130
    (tmp_path / "brake").unlink()
    again = start("resume", "run", "--workers", 1, "--strategy", "ps:sync:servers=3", "--json").wait().json
    assert again["reexecuted"] == 0
    check_whole(run.folder, again)
    weights = load_file(run.folder / "weights.safetensors")
    run.folder.rename(tmp_path / "first")

    alone = ["--strategy", "ps:sync:servers=1", "--workers", 1, "--save-every", 8]
    run = Watched(start, tmp_path, wait_until, *job, *alone)
    run.after(10)
    wait_until(lambda: run.journal("checkpoint"))
    kill_a_server(run)
    result = run.result()
    assert [entry["life"] for entry in run.journal("servers")][-1] == 2
    assert run.journal("servers")[-1]["sealed"] > 0
    assert again["weights_sha256"] == result["weights_sha256"]
    assert again["metrics"] == result["metrics"]
    assert weights["users.rows"].tolist() == sorted({user**2 % 23 * 170_000_001 for user in range(64)})
    assert weights["users.values"].shape == (len(weights["users.rows"]), 8)


def test_every_row_gradient_counts_once(start: Start, tmp_path: Path, wait_until: Wait) -> None:
    job = [JOB, "--set", "counts=true", "--set", "brake_s=0.2"]
    strategy = ["--strategy", "ps:async:n_push=2", "--workers", 2, "--save-every", 20]
    run = Watched(start, tmp_path, wait_until, *job, *strategy)
    run.after(10)
    kill_a_server(run)
    run.after(20)
    run.signal(run.living()[0], signal.SIGKILL)
    result = run.result()
    assert (result["steps"], result["reexecuted"]) == (60, 0)
    weights = load_file(run.folder / "weights.safetensors")
    users = (torch.arange(64).pow(2) % 23 * 170_000_001).tolist()
    # Each of the 15 epochs has every sample once; an update of two batches takes the mean, each has the weight 1.
    expected = [-users.count(row) * 15 / 2 for row in weights["users.rows"].tolist()]
    assert weights["users.values"].tolist() == [[value] * 8 for value in expected]
