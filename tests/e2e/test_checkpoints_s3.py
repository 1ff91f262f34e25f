"""Checkpoints in S3: the store goes in the middle of a save and comes back; a killed run is resumed from it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
import s3fs

from distbelief.checkpoint.reading import list_checkpoints, verify
from tests.support.checkpoint.s3 import Gate, s3_server
from tests.support.runs.command import Outcome, Run
from tests.support.runs.reference import undisturbed
from tests.support.runs.saved import JOB, LARGE, check_whole, kill_everything, notices, saved, step, until

Start = Callable[..., Run]
Cli = Callable[..., Outcome]

FOLDER = "s3://training/digits"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Every run finds the store behind the gate; this process beside it, so that it can look whenever it wants."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    keys = {"AWS_ACCESS_KEY_ID": "a key", "AWS_SECRET_ACCESS_KEY": "a secret", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    with s3_server() as port, Gate(port) as gate:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{gate.port}")
        monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": f"http://127.0.0.1:{port}"})
        s3fs.S3FileSystem.clear_instance_cache()
        fsspec.filesystem("s3").mkdir("training")
        yield gate
        s3fs.S3FileSystem.clear_instance_cache()


def test_the_store_goes_and_comes_back(start: Start, distbelief: Cli, tmp_path: Path, gate: Gate) -> None:
    run_dir, brake = tmp_path / "run", tmp_path / "brake"
    brake.touch()
    job = [JOB, *LARGE, "--set", "brake_s=0.1", "--set", "steps=400"]
    run = start("train", *job, "--run-dir", "run", "--workers", 2, "--checkpoints", FOLDER, "--save-every", 10)
    until(lambda: saved(run_dir), run)

    gate.shut_after(1_000_000)  # a third of a checkpoint
    until(lambda: gate.is_shut, run)
    before = list_checkpoints(FOLDER)
    until(lambda: [text for text in notices(run_dir) if f"cannot write {FOLDER}/" in text], run)
    told = next(text for text in notices(run_dir) if "is not saved" in text)
    assert "it is tried again (check the address, the keys and whether the store is up" in told
    told_at = step(run_dir)
    until(lambda: step(run_dir) > told_at + 5, run)  # nobody waits for it
    assert list_checkpoints(FOLDER) == before
    assert verify(FOLDER, before[0]).step == before[0]

    gate.reopen()
    until(lambda: saved(run_dir)[-1] > before[0], run)
    kill_everything(run)
    newest = list_checkpoints(FOLDER)[0]
    assert newest > before[0]
    assert not (run_dir / "checkpoints").exists()

    brake.unlink()
    outcome = distbelief("resume", "run", "--workers", 3, "--json")
    assert f"the run goes on from step {newest} ({FOLDER})" in outcome.stderr
    assert outcome.json["weights_sha256"] == undisturbed(*job)
    check_whole(run_dir, outcome.json)
    assert list_checkpoints(FOLDER)[0] == 400


def test_the_leading_machine_is_lost_with_its_disk(start: Start, distbelief: Cli, tmp_path: Path, gate: Gate) -> None:
    machine, brake = tmp_path / "machine", tmp_path / "brake"
    machine.mkdir()
    brake.touch()
    shutil.copy(JOB, machine / "job.py")
    settings = ["--set", "brake_s=0.1", "--set", "steps=60"]
    where = ["--run-dir", machine / "run", "--checkpoints", FOLDER, "--save-every", 5]
    run = start("train", machine / "job.py", *settings, *where, "--workers", 2)
    until(lambda: list_checkpoints(FOLDER), run)
    kill_everything(run)
    shutil.rmtree(machine)
    newest = list_checkpoints(FOLDER)[0]

    brake.unlink()
    outcome = distbelief("resume", FOLDER, "--run-dir", "new", "--workers", 3, "--json")
    assert f"the run goes on from step {newest} ({FOLDER})" in outcome.stderr
    assert outcome.json["weights_sha256"] == undisturbed(JOB, *settings)
    assert outcome.json["run_dir"] == "new"
    assert (tmp_path / "new" / "code" / "job.py").read_bytes() == JOB.read_bytes()

    again = distbelief("resume", FOLDER, "--run-dir", "new")
    assert "the run is complete" in again.stdout


def test_a_bucket_that_is_not_there(distbelief: Cli, tmp_path: Path, gate: Gate) -> None:
    outcome = distbelief("train", JOB, "--run-dir", "run", "--checkpoints", "s3://misspelt/digits")
    assert (outcome.status, outcome.stdout) == (1, "")
    assert "error: cannot write s3://misspelt/digits/" in outcome.stderr
    assert not (tmp_path / "run" / "journal.jsonl").exists()
