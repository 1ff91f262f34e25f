"""Kill, freeze, add and take away, at any moment: the run goes on, to the same weights."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable, Set
from pathlib import Path

import psutil
import pytest

from tests.support.runs.command import JOBS, Outcome, Run
from tests.support.runs.reference import undisturbed
from tests.support.runs.watched import Watched

Start = Callable[..., Run]
Cli = Callable[..., Outcome]
Wait = Callable[[Callable[[], object]], None]


@pytest.fixture
def watched(start: Start, tmp_path: Path, wait_until: Wait) -> Callable[..., Watched]:
    return lambda *arguments: Watched(start, tmp_path, wait_until, *arguments)


SMALL = [JOBS / "small.py", "--set", "brake_s=0.1", "--set", "steps=400"]  # long, not costly: it sleeps
SLOWER = [JOBS / "small.py", "--set", "brake_s=0.4", "--set", "steps=400"]  # to the same weights
EVERYTHING = [JOBS / "everything.py", "--set", "epochs=9", "--set", "brake_s=0.1"]


@pytest.mark.parametrize("transport", ["allreduce:shm", "allreduce:gloo"])
def test_the_same_weights_when_workers_are_killed(watched: Callable[..., Watched], transport: str) -> None:
    """With everything in the job that makes exactness hard, also killed in evaluations and while readers read."""
    run = watched(*EVERYTHING, "--workers", 3, "--strategy", transport)
    for steps in (5, 12, 20):
        run.after(steps)
        run.signal(random.Random(steps).choice(run.living()), signal.SIGKILL)
        run.after(steps + 2)
    result = run.result()
    assert result["weights_sha256"] == undisturbed(*EVERYTHING)
    assert result["recoveries"] >= 2


def test_the_rendezvous_server_killed_and_then_a_worker(watched: Callable[..., Watched]) -> None:
    """The next generation needs one to connect. Another one takes its place, at the same address."""
    job = [JOBS / "small.py", "--set", "hold_step=6"]
    run = watched(*job, "--workers", 3, "--strategy", "allreduce:gloo")
    run.after(6)
    victim = run.living()[1]
    os.kill(run.rendezvous_server(), signal.SIGKILL)
    run.signal(victim, signal.SIGKILL)
    run.wait_until(lambda: run.journal("lost"))
    assert run.result()["weights_sha256"] == undisturbed(*job)
    run.check_workers_lost(killed=[victim])
    assert "another one takes its place" in (run.folder / "logs" / "store.log").read_text()


def test_the_zygote_killed_ends_the_run_with_that_reason(watched: Callable[..., Watched]) -> None:
    run = watched(JOBS / "small.py", "--set", "hold_step=6", "--workers", 2)
    run.after(6)
    zygote = psutil.Process(min(run.members().values())).parent()
    assert zygote is not None
    zygote.kill()
    outcome = run.run.wait()
    assert outcome.status == 1
    assert "error: the process that starts workers has died" in outcome.stderr
    (end,) = run.journal("ended")
    assert (end["status"], end["reason"]) == ("stopped", "the process that starts workers has died")


def test_all_workers_killed_at_once(watched: Callable[..., Watched]) -> None:
    run = watched(*SMALL, "--workers", 3)
    run.after(8)
    killed = run.members().keys()
    run.kill(killed)
    result = run.result()
    assert result["weights_sha256"] == undisturbed(*SMALL)
    run.check_workers_lost(killed=killed)
    if not has_successor_before_the_last_is_lost(run, killed):
        assert [n for n in run.metrics("notice") if n["text"].startswith("paused")], run.metrics("notice")


def has_successor_before_the_last_is_lost(run: Watched, killed: Set[int]) -> bool:
    """Their deaths are reported one by one: on a busy machine somebody may have come in the place of the first when the
    last is heard of."""
    known, successors = set(), False
    for entry in run.journal("generation", "lost"):
        if entry["kind"] == "lost":
            known.add(entry["worker"])
        elif known & killed:
            successors = successors or not {member["worker"] for member in entry["members"]} <= killed
        if known >= killed:
            return successors
    raise AssertionError(f"not all are lost: {known}")


def test_the_only_worker_killed(watched: Callable[..., Watched]) -> None:
    run = watched(*SMALL, "--workers", 1)
    run.after(8)
    run.signal(0, signal.SIGKILL)
    assert run.result()["weights_sha256"] == undisturbed(*SMALL)


def test_a_frozen_worker_is_killed_and_replaced(watched: Callable[..., Watched]) -> None:
    run = watched(*SMALL, "--workers", 3)
    run.after(8)
    victim = run.living()[1]
    run.signal(victim, signal.SIGSTOP)
    result = run.result()
    assert result["weights_sha256"] == undisturbed(*SMALL)
    run.check_workers_lost(frozen=[victim])


def test_the_coordinator_killed_again_and_again(watched: Callable[..., Watched]) -> None:
    """The last time a worker is killed while no coordinator is there."""
    run = watched(*SMALL, "--workers", 3, "--no-balance")
    for kills, steps in enumerate((5, 12, 19), start=1):
        run.after(steps)
        os.kill(run.coordinator(), signal.SIGKILL)

        def is_replaced(epochs: int = kills + 1) -> bool:
            found = run.journal("epoch")
            return len(found) == epochs and found[-1]["pid"] == run.coordinator()  # it is journalled before it is known

        run.wait_until(is_replaced)
    run.after(run.step() + 5)
    if not run.journal("fenced"):
        assert len(run.journal("generation")) == 1  # no worker was started again, and none had to stop
    victim = run.living()[-1]
    os.kill(run.coordinator(), signal.SIGKILL)
    run.signal(victim, signal.SIGKILL)
    result = run.result()
    assert result["weights_sha256"] == undisturbed(*SMALL)
    assert len(run.journal("epoch")) == 5
    run.check_workers_lost(killed=[victim])


def test_a_frozen_coordinator_is_replaced(watched: Callable[..., Watched]) -> None:
    """Nobody needs it for the steps; but somebody must be there when a worker dies."""
    run = watched(*SMALL, "--workers", 2)
    run.after(5)
    victim = run.living()[-1]
    os.kill(run.coordinator(), signal.SIGSTOP)
    run.signal(victim, signal.SIGKILL)
    result = run.result()
    assert result["weights_sha256"] == undisturbed(*SMALL)
    assert len(run.journal("epoch")) == 2
    run.check_workers_lost(killed=[victim])


def test_growing_and_shrinking_in_one_run_also_by_a_signal(
    watched: Callable[..., Watched], start: Start, tmp_path: Path
) -> None:
    run = watched(*SLOWER, "--workers", 1)  # it outlasts all that is waited for here
    run.after(2)
    for wanted in (4, 2, 3):
        answer = start("scale", "run", wanted, "--json").wait().json
        assert answer["workers"] == wanted
        run.has_members(wanted)
        run.after(run.step() + 3)
    run.signal(min(run.members()), signal.SIGTERM)  # it leaves
    run.has_members(2)
    result = run.result()
    assert result["weights_sha256"] == undisturbed(*SMALL)
    run.check_workers_lost()
    assert result["workers"] == len(run.members()), "two, unless one was fenced in the end"
    too_late = start("scale", "run", 2).wait()
    assert (too_late.status, "is not running" in too_late.stderr) == (1, True)


def test_two_workers_join_by_hand_and_one_leaves_and_one_is_killed(
    watched: Callable[..., Watched], start: Start
) -> None:
    """A third one, which would compute other bits, is told why it may not."""
    run = watched(*SLOWER, "--workers", 2)  # guests import torch, which takes its time
    run.after(2)
    leaving, victim = start("worker", "--join", "run"), start("worker", "--join", "run")
    unfit = start("worker", "--join", "run", prefix=["env", "ATEN_CPU_CAPABILITY=default"])
    run.has_members(4)
    run.after(run.step() + 2)
    refused = unfit.wait()
    assert (refused.status, "computes with" in refused.stdout) == (1, True), refused.stdout
    leaving.signal(signal.SIGTERM)
    left = leaving.wait()
    assert (left.status, ": left" in left.stdout) == (0, True), left.stdout
    run.has_members(3)
    run.check_workers_lost()
    before = run.members()
    victim.signal(signal.SIGKILL)
    assert victim.wait().status == -signal.SIGKILL
    result = run.result()
    assert result["weights_sha256"] == undisturbed(*SMALL)
    (number,) = [worker for worker, pid in before.items() if pid == victim.pid]
    run.check_workers_lost(killed=[number])


def test_too_few_workers_pause_the_run_visibly(watched: Callable[..., Watched]) -> None:
    run = watched(*SMALL, "--workers", 2, "--min-workers", 2)
    run.after(8)
    run.signal(1, signal.SIGKILL)
    result = run.result()
    assert result["weights_sha256"] == undisturbed(*SMALL)
    assert [n["text"] for n in run.metrics("notice") if "1 of at least 2 workers is there" in n["text"]]


def test_late_shards_are_computed_by_those_who_wait(
    watched: Callable[..., Watched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Balancing is off, and one worker is slow: the others compute some of its shards for it, to the same bits."""
    job = [JOBS / "uneven.py", "--set", "steps=20"]
    run = watched(*job, "--workers", 2, "--no-balance")
    result = run.result()
    monkeypatch.chdir(tmp_path)  # where the file is that says who is slow
    assert result["weights_sha256"] == undisturbed(*job)
    slow, fast = sorted(entry["shards"] for entry in run.metrics("workers")[-1]["workers"])
    assert slow < 20 * 4 < fast  # each has four shards in a step


def test_who_helps_does_not_wait_for_a_command_that_is_stopped(watched: Callable[..., Watched], tmp_path: Path) -> None:
    """Memory for backups comes from its process. Nobody needs them."""
    run = watched(JOBS / "small.py", "--set", "brake_s=0.02", "--set", "steps=400", "--workers", 2, "--no-balance")
    run.after(5)
    run.run.signal(signal.SIGSTOP)
    (tmp_path / "slow").write_text(str(run.members()[1]))
    run.after(run.step() + 6)
    (tmp_path / "slow").unlink()
    run.run.signal(signal.SIGCONT)
    assert run.result()["weights_sha256"] == undisturbed(*SMALL)
    assert len(run.journal("epoch")) == 1
    if not run.journal("fenced"):
        assert len(run.journal("generation")) == 1


def test_a_shard_that_kills_whoever_computes_it_ends_the_run(distbelief: Cli) -> None:
    outcome = distbelief("train", JOBS / "broken.py", "--set", "fault=deadly", "--workers", 3, "--run-dir", "run")
    assert outcome.status == 1
    # Two, or three at the same time: one that waits may be computing it for another.
    assert re.search(r"shard 3 of step 0 has killed [23] workers", outcome.stderr)
