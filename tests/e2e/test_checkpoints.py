"""Saving while a run trains: by itself, on demand and before it stops; what is kept; and disks that do not want to."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from distbelief.checkpoint.reading import read_manifest, verify
from tests.support.runs.command import Outcome, Run, processes_of
from tests.support.runs.reference import undisturbed
from tests.support.runs.saved import (
    JOB,
    LARGE,
    check_whole,
    notices,
    records,
    saved,
    sealed,
    step,
    unsealed,
    until,
)

Start = Callable[..., Run]
Cli = Callable[..., Outcome]

SIXTY = ["--set", "steps=60"]
HOLDS = ["--set", "holds=true"]
SLOWER = ["--set", "brake_s=0.2"]  # few steps that take long cost less than many that do not


@pytest.fixture
def brake(tmp_path: Path) -> Path:
    (tmp_path / "brake").touch()
    return tmp_path / "brake"


# --- signals ---------------------------------------------------------------------------------------------------------


def test_a_signal_saves_and_stops(start: Start, distbelief: Cli, tmp_path: Path, brake: Path) -> None:
    """SIGTERM; for SIGINT see test_processes.py."""
    run_dir = tmp_path / "run"
    run = start("train", JOB, *SLOWER, *SIXTY, "--run-dir", "run", "--workers", 2, "--save-every", "end")
    until(lambda: step(run_dir) > 3, run)
    run.signal(signal.SIGTERM)
    outcome = run.wait()
    assert outcome.status == 143
    assert "SIGTERM received: the run stops when a checkpoint is saved" in outcome.stdout
    (at,) = sealed(run_dir)
    assert outcome.stderr.splitlines() == [
        f"error: stopped by SIGTERM; the newest checkpoint is of step {at}; nothing is left running",
        "what to do: go on with `distbelief resume run`",
    ]
    assert at < 60
    assert verify(run_dir / "checkpoints", at).step == at
    brake.unlink()
    result = distbelief("resume", "run", "--workers", 3, "--json")
    assert f"the run goes on from step {at}" in result.stderr
    assert result.json["weights_sha256"] == undisturbed(JOB, *SIXTY)
    check_whole(run_dir, result.json)


def test_a_second_signal_does_not_wait(start: Start, distbelief: Cli, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (tmp_path / "hold").write_text("2")  # no checkpoint can be made there
    run = start("train", JOB, *HOLDS, *SIXTY, "--run-dir", "run", "--workers", 2, "--save-every", "end")
    until(lambda: step(run_dir), run)
    run.signal(signal.SIGTERM)
    until(lambda: [text for text in notices(run_dir) if "a second signal stops it at once" in text], run)
    run.signal(signal.SIGTERM)
    outcome = run.wait()
    assert outcome.status == 143
    assert "stopped by SIGTERM; there is no checkpoint; nothing is left running" in outcome.stderr
    assert sealed(run_dir) == []
    (tmp_path / "hold").unlink()
    result = distbelief("resume", "run", "--json")
    assert "there is no checkpoint in" in result.stderr
    assert result.json["weights_sha256"] == undisturbed(JOB, *SIXTY)
    check_whole(run_dir, result.json)


# --- on demand -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_on_demand(start: Start, distbelief: Cli, tmp_path: Path, brake: Path) -> None:
    run_dir = tmp_path / "run"
    run = start(
        "train", JOB, *SLOWER, "--set", "steps=300", "--run-dir", "run", "--workers", 2, "--save-every", "end", "--json"
    )
    until(lambda: step(run_dir) > 1, run)
    told = distbelief("checkpoint", "run")
    assert told.status == 0, told
    (first,) = sealed(run_dir)
    named = int(told.stderr.removeprefix("a checkpoint of step ").split()[0])
    assert told.stderr == f"a checkpoint of step {named} will be saved, or of one soon after\n"
    assert named <= first < 300  # members may have passed that step before they heard of it
    assert told.stdout.startswith(f"saved {run_dir}/checkpoints/step-{first:09d} (")
    answer = distbelief("checkpoint", "run", "--json")
    second = sealed(run_dir)[0]
    folder = run_dir / "checkpoints" / f"step-{second:09d}"
    size = sum(part.stat().st_size for part in folder.glob("part-*"))
    assert answer.json == {"step": second, "path": str(folder), "size_bytes": size}
    assert first < second < 300
    brake.unlink()
    assert run.wait().json["steps"] == 300
    assert [verify(run_dir / "checkpoints", number).step for number in sealed(run_dir)] == [300, second, first]

    late = distbelief("checkpoint", "run", "--json")
    assert (late.status, json.loads(late.stdout)) == (1, {"error": "the run in run is not running"})


def test_no_checkpoints_at_all(start: Start, distbelief: Cli, tmp_path: Path, brake: Path) -> None:
    run = start(
        "train",
        JOB,
        *SLOWER,
        "--set",
        "steps=300",
        "--run-dir",
        "run",
        "--workers",
        2,
        "--save-every",
        "never",
        "--json",
    )
    until(lambda: step(tmp_path / "run"), run)
    refused = distbelief("checkpoint", "run")
    assert (refused.status, refused.stdout) == (1, "")
    assert refused.stderr == "error: the run was started without checkpoints (--save-every never)\n"
    brake.unlink()
    assert run.wait().json["steps"] == 300
    assert not (tmp_path / "run" / "checkpoints").exists()


# --- when, and what is kept ------------------------------------------------------------------------------------------


def test_by_the_clock(start: Start, tmp_path: Path, brake: Path) -> None:
    run_dir = tmp_path / "run"
    run = start(
        "train", JOB, *SLOWER, "--set", "steps=200", "--run-dir", "run", "--workers", 2, "--save-every", "1s", "--json"
    )
    until(lambda: len(saved(run_dir)) >= 3, run)
    brake.unlink()
    assert run.wait().json["steps"] == 200
    *regular, last = records(run_dir, "checkpoint")
    assert last["step"] == 200
    times = [entry["at"] for entry in regular]
    assert all(later - earlier >= 1 for earlier, later in itertools.pairwise(times))


def test_what_is_kept(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    keep = ["--keep-last", 2, "--keep-every", 20, "--keep-best", "loss"]
    often = ["--save-every", 5, "--set", "evaluate_every=5", "--set", "steps=63"]
    hold = tmp_path / "hold"
    hold.write_text("7")
    run = start("train", JOB, *HOLDS, *often, *keep, "--run-dir", "run", "--workers", 2)
    for number in range(5, 65, 5):  # each is waited for, so that none is left out for the one before
        until(lambda number=number: number in saved(run_dir), run)
        (tmp_path / "next").write_text(str(number + 7))
        (tmp_path / "next").rename(hold)
    assert run.wait().status == 0
    steps = saved(run_dir)
    losses = {entry["step"]: entry["metrics"]["loss"] for entry in records(run_dir, "evaluation")}
    best = min(steps, key=losses.__getitem__)
    assert set(sealed(run_dir)) == {best, *steps[-2:], *(number for number in steps if number % 20 == 0)}
    assert steps == [*range(5, 65, 5), 63]
    assert len(steps) > len(sealed(run_dir))
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {f"step-{n:09d}" for n in sealed(run_dir)}
    assert read_manifest(run_dir / "checkpoints", best).metrics["loss"] == losses[best]


def test_a_death_in_the_middle_of_a_save(start: Start, tmp_path: Path, brake: Path) -> None:
    """Of a worker, then of the coordinator: the run goes on, and every checkpoint that counts is whole."""
    run_dir = tmp_path / "run"
    job = [JOB, *LARGE, "--set", "steps=400", "--set", "brake_s=0.1"]
    run = start("train", *job, "--run-dir", "run", "--workers", 3, "--save-every", 5, "--keep-last", 100, "--json")
    for kind, fact in (("generation", "members"), ("epoch", "pid")):
        until(lambda: saved(run_dir), run)
        before = unsealed(run_dir)
        until(lambda before=before: unsealed(run_dir) - before, run)
        found = records(run_dir, kind, "journal.jsonl")[-1][fact]
        os.kill(found if kind == "epoch" else found[1]["pid"], signal.SIGKILL)
        newest = saved(run_dir)[-1]
        until(lambda newest=newest: saved(run_dir)[-1] > newest + 5, run)
    brake.unlink()
    result = run.wait().json
    assert result["weights_sha256"] == undisturbed(*job)
    check_whole(run_dir, result)
    assert result["recoveries"] >= 1
    left = sealed(run_dir)
    assert left[0] == 400
    assert [verify(run_dir / "checkpoints", number).step for number in left] == left


# --- disks -----------------------------------------------------------------------------------------------------------


def test_a_place_that_cannot_be_written_to(distbelief: Cli, tmp_path: Path) -> None:
    """Said before training begins; also to root, who may write anywhere but below a file."""
    (tmp_path / "file").touch()
    outcome = distbelief("train", JOB, "--checkpoints", "file/checkpoints", "--run-dir", "run")
    assert (outcome.status, outcome.stdout) == (1, "")
    assert outcome.stderr.count("error:") == 1
    assert f"{tmp_path}/file/checkpoints" in outcome.stderr
    assert "Not a directory" in outcome.stderr
    assert not (tmp_path / "run" / "journal.jsonl").exists()


def test_a_folder_with_checkpoints_of_another_run(distbelief: Cli, tmp_path: Path) -> None:
    """They would be taken for this run's own."""
    often = ["--checkpoints", "folder", "--save-every", 6, "--workers", 1]
    assert distbelief("train", JOB, *often, "--run-dir", "one").status == 0
    outcome = distbelief("train", JOB, *often, "--set", "seed=1", "--run-dir", "other")
    assert (outcome.status, outcome.stdout) == (1, "")
    assert f"{tmp_path}/folder holds checkpoints of another run" in outcome.stderr
    assert not (tmp_path / "other" / "journal.jsonl").exists()


MOUNT = 'mount -t tmpfs -o size=12m tmpfs disk && head -c 8m /dev/zero > disk/filler && exec "$@"'


def small_disk(folder: Path) -> list[str]:
    """What to put before a command to give it a disk of its own, with room for one large checkpoint but not for two."""
    (folder / "disk").mkdir()
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("only root can mount")
    prefix = ["unshare", "--mount", "sh", "-c", MOUNT, "sh"]
    done = subprocess.run([*prefix, "true"], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    return prefix


def test_a_disk_that_fills_up(start: Start, tmp_path: Path, brake: Path) -> None:
    """The run goes on and says so; when there is room again, it saves."""
    run_dir = tmp_path / "run"
    job = [JOB, *LARGE, "--set", "steps=200", "--set", "brake_s=0.1"]
    run = start(
        "train", *job, "--run-dir", "run", "--workers", 2, "--json",
        "--checkpoints", "disk", "--save-every", 10, "--keep-last", 1, prefix=small_disk(tmp_path),
    )  # fmt: skip
    until(lambda: [text for text in notices(run_dir) if "No space left on device" in text], run)
    told_at = step(run_dir)
    assert saved(run_dir)[:1] == [10]
    until(lambda: step(run_dir) > told_at + 5, run)
    engine = processes_of(run.mark)[0].pid
    Path(f"/proc/{engine}/root{tmp_path}/disk/filler").unlink()  # as the run sees it
    until(lambda: len(saved(run_dir)) > 1, run)
    brake.unlink()
    result = run.wait().json
    assert result["weights_sha256"] == undisturbed(*job)
    assert saved(run_dir)[-1] == 200
    check_whole(run_dir, result)
    told = [text for text in notices(run_dir) if "No space left on device" in text]
    assert "free some space there" in told[0]
    assert len(told) == 1
