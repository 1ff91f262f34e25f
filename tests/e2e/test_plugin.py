"""A strategy from outside of the package, by entry point: signSGD with majority vote (tests/plugins/signsgd)."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distbelief.control.addresses import host_name
from distbelief.control.keyfiles import new_key
from tests.support.plugins import install
from tests.support.ports import free_port
from tests.support.runs.command import JOBS, Outcome, Run

Cli = Callable[..., Outcome]
Start = Callable[..., Run]
Wait = Callable[[Callable[[], Any]], None]

JOB = [JOBS / "served.py", "--set", "steps=60"]
SIGNSGD = [*JOB, "--strategy", "signsgd", "--json"]
HELD = [JOBS / "small.py", "--set", "hold_step=5", "--strategy", "signsgd", "--json"]
WITHOUT = ["env", "-u", "PYTHONPATH"]
"""Before a command: the plug-in is not on its path."""


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


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


def journal(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    path = run_dir / "journal.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [entry for line in lines if (entry := json.loads(line))["kind"] == kind]


def check_refused(outcome: Outcome, host: str) -> None:
    """One error that says which strategy which host lacks, and what to install there."""
    assert outcome.status == 2
    lacks = f"the host {host} has no strategy 'signsgd', which comes with the plug-in distbelief-signsgd==0.1"
    assert outcome.stderr.splitlines() == [
        f"error: {lacks}",
        "what to do: install it there: pip install distbelief-signsgd==0.1",
    ]
    assert "Traceback" not in outcome.stdout


def check_shown(log: str, who: str) -> None:
    """The run's own output says it too."""
    (line,) = [line for line in log.splitlines() if "is refused" in line]
    assert f"{who} is refused: " in line
    assert "has no strategy 'signsgd'" in line
    assert "pip install distbelief-signsgd==0.1" in line


def test_a_second_host_without_the_plugin_is_refused_and_the_run_goes_on(
    start: Start, installed: Path, tmp_path: Path, wait_until: Wait
) -> None:
    where, run_dir, key, brake = free_address(), tmp_path / "run", tmp_path / "key", tmp_path / "brake"
    new_key(key)
    brake.touch()
    lead = start("coordinator", *HELD, "--workers", 2, "--listen", where, "--key", key, "--run-dir", run_dir)
    join = ("worker", "--join", where, "--key", key)
    first = start(*join, "--count", 2, "--host", "one")
    wait_until(lambda: journal(run_dir, "generation"))
    check_refused(start(*join, "--host", "two", prefix=WITHOUT).wait(), "two")
    assert [entry["host"] for entry in journal(run_dir, "declined")] == ["two"]
    brake.unlink()
    ended = lead.wait()
    check_shown(ended.stderr, "the host two")
    assert (ended.json["workers"], ended.json["recoveries"]) == (2, 0)
    assert len(journal(run_dir, "generation")) == 1, "nothing has changed for the members"
    assert first.wait().status == 0


def test_a_run_that_needs_another_host_waits_for_one_that_has_the_plugin(
    start: Start, installed: Path, tmp_path: Path
) -> None:
    where, run_dir, key = free_address(), tmp_path / "run", tmp_path / "key"
    new_key(key)
    lead = start("coordinator", *HELD, "--workers", 1, "--listen", where, "--key", key, "--run-dir", run_dir)
    join = ("worker", "--join", where, "--key", key, "--host", "two")
    check_refused(start(*join, prefix=WITHOUT).wait(), "two")
    second = start(*join)
    ended = lead.wait()
    check_shown(ended.stderr, "the host two")
    assert "the run waits for room for 1 more worker" in ended.stderr
    assert ended.json["workers"] == 1
    assert second.wait().status == 0


def test_a_launchers_host_without_the_plugin_is_refused(start: Start, installed: Path, tmp_path: Path) -> None:
    """Each process of the cluster gets the same command; on the second host the plug-in is missing."""
    cluster = {"chief": [free_address()], "worker": ["other:1"]}
    new_key(tmp_path / "key")
    options = ["--on", "tf_config", "--key", "key", "--run-dir", "run"]

    def task(kind: str, *prefix: str) -> Run:
        config = json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}})
        return start("train", *HELD, *options, prefix=[*prefix, "env", f"TF_CONFIG={config}"])

    chief, worker = task("chief"), task("worker", *WITHOUT)
    check_refused(worker.wait(), "other")
    assert [entry["host"] for entry in journal(tmp_path / "run", "declined")] == ["other"]
    chief.signal(signal.SIGTERM)  # it waits for another host
    ended = chief.wait()
    assert ended.status == 128 + signal.SIGTERM
    check_shown(ended.stderr, "the host other")


def test_a_worker_started_by_hand_without_the_plugin_is_refused(
    start: Start, installed: Path, tmp_path: Path, wait_until: Wait
) -> None:
    """On the run's own host, in another environment."""
    run_dir, brake = tmp_path / "run", tmp_path / "brake"
    brake.touch()
    lead = start("train", *HELD, "--workers", 2, "--run-dir", run_dir)
    wait_until(lambda: journal(run_dir, "generation"))
    check_refused(start("worker", "--join", run_dir, prefix=WITHOUT).wait(), host_name())
    brake.unlink()
    ended = lead.wait()
    check_shown(ended.stderr, f"a worker that was started by hand on {host_name()}")
    assert ended.json["workers"] == 2
    assert journal(run_dir, "admitted") == []
