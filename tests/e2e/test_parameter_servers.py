"""ps:sync in real runs: the weights of allreduce on any number of workers and servers, whoever dies."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from distbelief.control.messages import CheckpointRequested, ServersRequested
from distbelief.coordinator.client import ask
from tests.support.runs.command import JOBS, Outcome, Run
from tests.support.runs.reference import undisturbed
from tests.support.runs.saved import check_whole, sealed, step, until
from tests.support.runs.watched import Watched, check_servers_lost

Start = Callable[..., Run]
Cli = Callable[..., Outcome]
Wait = Callable[[Callable[[], object]], None]

SMALL = [JOBS / "small.py", "--set", "brake_s=0.02", "--set", "steps=600"]
SLICED = [JOBS / "small.py", "--set", "brake_s=0.1", "--set", "steps=300", "--set", "width=3000"]
EVERYTHING = [JOBS / "everything.py", "--set", "epochs=2"]
TINY = JOBS / "served.py"


class Served(Watched):
    def notices(self) -> str:
        return "\n".join(entry["text"] for entry in self.metrics("notice"))


@pytest.fixture
def watched(start: Start, tmp_path: Path, wait_until: Wait) -> Callable[..., Served]:
    return lambda *arguments: Served(start, tmp_path, wait_until, *arguments)


@pytest.mark.parametrize(
    ("workers", "strategy"),
    [(1, "ps:sync:servers=1"), (4, "ps:sync:servers=3"), (7, "ps:sync:tcp")],  # 7: each has one shard
)
def test_the_weights_of_allreduce(distbelief: Cli, tmp_path: Path, workers: int, strategy: str) -> None:
    """With everything in the job that makes exactness hard."""
    options = ["--workers", workers, "--strategy", strategy, "--run-dir", "run", "--json"]
    result = distbelief("train", *EVERYTHING, *options).json
    assert result["weights_sha256"] == undisturbed(*EVERYTHING)
    check_servers_lost(tmp_path / "run", result)


@pytest.mark.parametrize("strategy", ["ps:sync", "ps:sync:servers=3:tcp"])
def test_servers_and_a_worker_are_killed(watched: Callable[..., Served], strategy: str) -> None:
    run = watched(*SMALL, "--workers", 2, "--strategy", strategy)
    run.after(10)
    run.signal_server(0, signal.SIGKILL)
    run.after(20)
    run.signal(1, signal.SIGKILL)
    run.after(40)
    run.servers_are_whole(without=[0])
    second = min(run.servers())
    run.signal_server(second, signal.SIGKILL)
    run.after(run.step() + 5)
    result = run.result()
    assert result["weights_sha256"] == undisturbed(*SMALL)
    check_servers_lost(run.folder, result, killed=[0, second])
    assert "server 0 died" in run.notices()


def test_the_only_server_killed_goes_back_and_says_so(watched: Callable[..., Served]) -> None:
    run = watched(*SMALL, "--workers", 2, "--strategy", "ps:sync:servers=1", "--save-every", 8)
    run.after(30)
    run.wait_until(lambda: run.journal("checkpoint"))
    run.signal_server(0, signal.SIGKILL)
    result = run.result()
    assert result["weights_sha256"] == undisturbed(*SMALL)
    assert result["servers_lost"] == 1
    assert "go back to a checkpoint" in run.notices()
    anew = next(entry for entry in run.journal("servers") if entry["life"] == 2)
    assert anew["sealed"] > 0  # not from the beginning
    reached = max(entry["step"] + 1 for entry in run.metrics("step") if entry["at"] < anew["at"])
    if reached > anew["sealed"]:  # else it died in the moment in which that was written
        assert [back["step"] for back in run.metrics("rollback")] == [anew["sealed"]]


def test_a_frozen_server_and_one_that_dies_while_the_coordinator_is_away(watched: Callable[..., Served]) -> None:
    run = watched(*SMALL, "--workers", 2, "--strategy", "ps:sync")
    run.after(20)
    os.kill(run.coordinator(), signal.SIGKILL)
    run.signal_server(0, signal.SIGKILL)
    run.after(run.step() + 10)
    run.servers_are_whole(without=[0])
    second = min(run.servers())
    run.signal_server(second, signal.SIGSTOP)
    result = run.result()
    assert result["weights_sha256"] == undisturbed(*SMALL)
    assert len(run.journal("epoch")) == 2
    check_servers_lost(run.folder, result, killed=[0], frozen=[second])


def test_stopped_by_control_c_and_resumed_with_other_servers_and_without(start: Start, tmp_path: Path) -> None:
    """One server, then three, then none, then two again: each goes on from what the one before has saved."""
    run_dir, brake = tmp_path / "run", tmp_path / "brake"
    brake.touch()
    run = start("train", *SMALL, "--run-dir", "run", "--workers", 2, "--strategy", "ps:sync:servers=1")
    for strategy in ("ps:sync:servers=3", "allreduce", "ps:sync"):
        before = step(run_dir)
        until(lambda before=before: step(run_dir) > before + 5, run)
        run.signal(signal.SIGINT)
        assert run.wait().status == 130
        assert sealed(run_dir)[0] > before
        if strategy == "ps:sync":
            brake.unlink()
        run = start("resume", "run", "--workers", 2, "--strategy", strategy, "--json")
    result = run.wait().json
    assert result["weights_sha256"] == undisturbed(*SMALL)
    assert (result["servers"], result["servers_lost"]) == (2, 0)
    check_whole(run_dir, result)


def test_servers_come_and_go_by_command_and_late_workers_are_helped(
    watched: Callable[..., Served], start: Start, tmp_path: Path
) -> None:
    """Slices move while training goes on. A worker is 20 times slower, then the one that leads is: others compute their
    shards. Nobody has other bits."""
    run = watched(*SLICED, "--workers", 3, "--strategy", "ps:sync:backups=1", "--no-balance", "--save-every", "end")
    run.after(5)

    def slow_down(worker: int) -> None:
        (tmp_path / "draft").write_text(str(run.members()[worker]))
        (tmp_path / "draft").rename(tmp_path / "slow")

    def has_holders(wanted: int) -> bool:
        placed = run.journal("servers")[-1]["placement"]
        holders = {*placed["map"]["primaries"], *placed["map"]["backups"]} - {-1}
        return set(placed["recruits"]) == {-1} and len(holders) == wanted

    slow_down(1)
    answer = start("scale", "run", "--servers", 3, "--json").wait().json
    assert (answer["servers"], answer["text"]) == (3, "1 more server is being started")
    for wanted, words in ((3, "already"), (1, "there is no backup"), (2, "1 more server is")):
        assert words in ask(run.folder, ServersRequested(wanted)).text
        run.wait_until(lambda: has_holders(wanted))  # noqa: B023
        run.after(run.step() + 4)
        slow_down(0)
    assert ask(run.folder, CheckpointRequested()).ok
    run.wait_until(lambda: run.journal("checkpoint"))  # though some are behind the others
    result = run.result()
    assert result["weights_sha256"] == undisturbed(*SLICED)
    assert result["helped"] > 5
    assert result["servers"] == 2
    check_servers_lost(run.folder, result)
    run.check_workers_lost()
    assert [entry["target"] for entry in run.journal("servers_scaled")] == [3, 3, 1, 2]
    assert "has handed its slices over and leaves" in run.notices()
    check_whole(run.folder, result)


def test_more_servers_than_parameters_and_a_worker_without_samples_and_a_replay(
    watched: Callable[..., Served], start: Start
) -> None:
    """Five samples in batches of eight: the last shard is always empty. Who has it saves its part of each step, too."""
    job = [TINY, "--set", "samples=5"]
    run = watched(*job, "--strategy", "ps:sync:servers=3", "--workers", 4, "--save-every", 1)
    assert run.result()["weights_sha256"] == undisturbed(*job)
    assert "the servers have gone on" not in run.notices()
    again = start("replay", "run", "--step", 4).wait()
    assert again.status == 0, again.stderr


def test_a_loss_that_is_no_number_is_the_same_error_as_in_allreduce(distbelief: Cli) -> None:
    said = []
    for strategy in ("allreduce", "ps:sync"):
        outcome = distbelief("train", TINY, "--set", "fault=nan", "--strategy", strategy, "--workers", 1)
        assert outcome.status == 1
        said.append([line for line in outcome.stderr.splitlines() if "loss" in line])
    assert said[0] == said[1] != []


def test_a_job_that_servers_cannot_load_gives_one_clear_error(distbelief: Cli) -> None:
    outcome = distbelief("train", TINY, "--set", "fault=server", "--strategy", "ps:sync", "--workers", 2, "--plain")
    assert outcome.status == 2
    line, *traceback = outcome.stderr.splitlines()
    assert re.fullmatch(r"error: server [01]: job\(\) failed in served.py, line \d+: .*: no server can load this", line)
    assert traceback[0].strip() == "Traceback (most recent call last):"
    assert not [one for one in traceback if "/distbelief/" in one and "/jobs/" not in one], "the user's code alone"


def test_strategies_that_make_no_sense(distbelief: Cli) -> None:
    for strategy, message in [("ps:foo", "unknown option 'foo'"), ("ps:sync:servers=0", "must be at least 1, not 0")]:
        outcome = distbelief("train", TINY, "--strategy", strategy)
        assert (outcome.status, message in outcome.stderr) == (2, True), outcome.stderr
