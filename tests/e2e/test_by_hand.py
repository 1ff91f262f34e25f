"""Members started by hand, each agent a host of its own: by address and key, before and after the coordinator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distbelief.control.keyfiles import new_key
from tests.support.ports import free_port
from tests.support.runs.command import JOBS, Run
from tests.support.runs.reference import undisturbed
from tests.support.runs.saved import until

Start = Callable[..., Run]
SMALL = JOBS / "small.py"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    new_key(tmp_path / "run.key")
    return tmp_path / "run.key"


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    path = run_dir / "journal.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [entry for line in lines if (entry := json.loads(line))["kind"] == kind]


def members(run_dir: Path) -> list[dict[str, Any]]:
    found = records(run_dir, "generation")
    return list(found[-1]["members"]) if found else []


needs_mounts = pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0,
    reason="only where a process may have mounts of its own can it be one that does not see a folder",
)


def unseen(folder: Path) -> list[str]:
    """What to put before a command for which that folder is empty."""
    return ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {folder} && exec "$@"', "sh"]


def test_hosts_join_by_address_members_die_and_a_host_leaves(start: Start, tmp_path: Path, key: Path) -> None:
    """The hosts come before the coordinator; a worker is killed; one host leaves and another one comes."""
    where, run_dir, brake = f"127.0.0.1:{free_port()}", tmp_path / "run", tmp_path / "brake"
    brake.touch()

    def host(name: str, count: int) -> Run:
        return start("worker", "--join", where, "--key", key, "--count", count, "--host", name)

    first, second = host("one", 1), host("two", 2)
    lead = start(
        *("coordinator", SMALL, "--workers", 3, "--listen", where, "--key", key, "--run-dir", run_dir),
        *("--set", "steps=600", "--set", "brake_s=0.2", "--json"),
    )
    until(lambda: len(members(run_dir)) == 3, lead)
    assert sorted(member["host"] for member in members(run_dir)) == ["one", "two", "two"]
    victim = next(member for member in members(run_dir) if member["host"] == "two")
    os.kill(victim["pid"], signal.SIGKILL)
    until(lambda: len(found := members(run_dir)) == 3 and victim not in found, lead)
    assert sorted(member["host"] for member in members(run_dir)) == ["one", "two", "two"], "replaced on its host"
    first.signal(signal.SIGTERM)
    left = first.wait()
    assert left.status == 0, left.stderr
    assert "has left" in left.stdout
    until(lambda: {member["host"] for member in members(run_dir)} == {"two"}, lead)
    third = host("three", 1)
    until(lambda: "three" in {member["host"] for member in members(run_dir)}, lead)
    brake.unlink()
    assert lead.wait().json["weights_sha256"] == undisturbed(SMALL, "--set", "steps=600")
    for run in (second, third):
        outcome = run.wait()
        assert outcome.status == 0, outcome.stderr
        assert "the run is over: completed" in outcome.stdout


def test_hosts_join_the_run_again_after_its_leader_was_killed(start: Start, tmp_path: Path, key: Path) -> None:
    """The next leader has the same key and address. Old agents and workers are sent back, not called attackers."""
    where, run_dir, brake = f"127.0.0.1:{free_port()}", tmp_path / "run", tmp_path / "brake"
    brake.touch()
    hosts = [start("worker", "--join", where, "--key", key, "--host", name) for name in ("one", "two")]
    job = [SMALL, "--set", "steps=200", "--set", "brake_s=0.2"]
    lead = start("coordinator", *job, "--workers", 2, "--listen", where, "--key", key, "--run-dir", run_dir)
    until(lambda: len(members(run_dir)) == 2, lead)
    before = records(run_dir, "generation")
    lead.signal(signal.SIGKILL)
    lead.wait()
    again = start("resume", run_dir, "--listen", where, "--key", key, "--json")
    until(lambda: len(records(run_dir, "generation")) > len(before), again)
    assert len(members(run_dir)) == 2
    assert {one["pid"] for one in members(run_dir)}.isdisjoint(one["pid"] for one in before[-1]["members"])
    brake.unlink()
    result = again.wait().json
    assert (result["weights_sha256"], result["refused"]) == (undisturbed(*job), {})
    for host in hosts:
        outcome = host.wait()
        assert (outcome.status, "this host joins the next one" in outcome.stdout) == (0, True), outcome
        assert "the run is over: completed" in outcome.stdout
        assert outcome.stdout.count("takes part in") == 2, "with the parcel of the killed leader it would join thrice"
    log = (run_dir / "logs" / "coordinator.log").read_text()
    gone = "the process that started the run is gone"  # the killed leader's coordinator may come to say so
    told_before = any(entry["reason"] == gone for entry in records(run_dir, "ended"))
    assert told_before or "of another start with the same key, and is told to join again" in log
    assert "refused" not in log


@needs_mounts
def test_a_host_that_does_not_have_the_jobs_files_is_sent_them(start: Start, tmp_path: Path, key: Path) -> None:
    """Nor does it see the run directory: the leading process runs where the files are, the agent where they are not.
    What its worker records of its steps comes back all the same."""
    there = tmp_path / "there"
    there.mkdir()
    (there / "helper.py").write_text("SIZE = 3\n")
    (there / "job.py").write_text(
        "import torch\nfrom helper import SIZE\nfrom distbelief import Job\n"
        "job = Job(model=lambda: torch.nn.Linear(SIZE, 1), loss=torch.nn.functional.mse_loss,\n"
        "          optimizer=lambda p: torch.optim.SGD(p, lr=0.1), data=(torch.ones(32, SIZE), torch.ones(32, 1)),\n"
        "          global_batch=8, steps=4)\n"
    )
    where = f"127.0.0.1:{free_port()}"
    lead = start(
        *("coordinator", there / "job.py", "--workers", 1, "--listen", where, "--key", key),
        *("--save-every", "never", "--profile-steps", "1:4", "--run-dir", there / "run", "--json"),
    )
    agent = start("worker", "--join", where, "--key", key, prefix=unseen(there))
    result = lead.wait().json
    assert result["steps"] == 4
    assert [one["steps"] for one in result["profile"]["workers"]] == [3]
    assert "aten::addmm" in [one["name"] for one in result["profile"]["operators"]]
    outcome = agent.wait()
    assert outcome.status == 0, outcome.stdout + outcome.stderr


@needs_mounts
def test_a_host_that_does_not_see_the_run_directory_is_told_what_to_do(start: Start, tmp_path: Path, key: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    where = f"127.0.0.1:{free_port()}"
    lead = start("coordinator", SMALL, "--workers", 1, "--listen", where, "--key", key, "--run-dir", there / "run")
    outcome = start("worker", "--join", where, "--key", key, prefix=unseen(there)).wait()
    assert outcome.status != 0
    assert "does not see the run directory" in outcome.stderr
    assert "--checkpoints" in outcome.stderr
    lead.signal(signal.SIGINT)
    assert lead.wait().status == 130
