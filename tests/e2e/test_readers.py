"""Reader processes that die in whole runs: the same weights, or one error that names the samples (test_bad_input)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.support.runs.command import JOBS, Outcome
from tests.support.runs.reference import undisturbed
from tests.support.runs.watched import Start, Wait, Watched, expect_ours

Cli = Callable[..., Outcome]


def below(worker: int, name: str) -> list[psutil.Process]:
    expect_ours(worker)
    return [child for child in psutil.Process(worker).children(recursive=True) if child.name() == name]


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE  # a worker reaps its readers' parent at its own end
    except psutil.NoSuchProcess:
        return False


def test_killed_readers_and_their_parent_change_no_bit(start: Start, tmp_path: Path, wait_until: Wait) -> None:
    """Of one worker all readers are killed, of training and of validation. Of another one the process that forks them:
    that worker ends and is replaced."""
    job = [JOBS / "everything.py", "--set", "hold_step=4"]
    run = Watched(start, tmp_path, wait_until, *job, "--workers", 3)
    run.after(4)
    members = run.members()
    assert len(members) == 3
    killed = below(members[0], "reader") + below(members[1], "reader parent")
    assert len(killed) == 4
    for process in killed:
        process.kill()
    wait_until(lambda: not any(map(lives, killed)))
    result = run.result()
    assert result["weights_sha256"] == undisturbed(*job)
    run.check_workers_lost(killed=[1])
    logs = [(run.folder / "logs" / f"worker-{worker}.log").read_text() for worker in (0, 1)]
    assert "was killed by SIGKILL while idle" in logs[0]
    assert "this worker ends: the process that forks the readers of the data set Augmented is dead" in logs[1]


def test_chaos_kills_readers(distbelief: Cli, tmp_path: Path) -> None:
    (tmp_path / "brake").touch()
    job = [JOBS / "everything.py", "--set", "epochs=5", "--set", "brake_s=0.05"]
    faults = "kill reader 1 at step 4, kill reader at step 9"
    shown = distbelief("chaos", *job, "--faults", faults, "--workers", 2, "--json").json
    context = json.dumps(shown, indent=1)
    assert shown["weights_equal"], context
    assert shown["steps_lost"] == 0, context
    assert shown["exactly_once"], context
    assert [fault["kind"] for fault in shown["faults"]] == ["kill reader", "kill reader"], context
    assert shown["not_carried_out"] == [], context
