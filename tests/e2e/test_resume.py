"""A run that was killed or stopped goes on, on any number of workers, to the weights of one that never was."""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distbelief.checkpoint.reading import verify
from tests.support.runs.command import Outcome, Run, processes_of
from tests.support.runs.reference import undisturbed
from tests.support.runs.saved import (
    JOB,
    LARGE,
    SLOW,
    check_whole,
    damage,
    kill_all,
    kill_everything,
    notices,
    records,
    sealed,
    step,
    unsealed,
    until,
)

Start = Callable[..., Run]
Cli = Callable[..., Outcome]

SIXTY = [JOB, "--set", "steps=60", "--set", "holds=true"]
KILLS = int(os.environ.get("DISTBELIEF_KILLS", "3"))
SEED = int(os.environ.get("DISTBELIEF_SEED", "0")) or secrets.randbelow(1 << 32)


@pytest.mark.timeout(600 + 30 * KILLS)
def test_everything_is_killed_again_and_again(start: Start, tmp_path: Path) -> None:
    """While it starts, while it trains and in the middle of saves; each time it goes on with other workers.

    DISTBELIEF_KILLS=50 is the long version. DISTBELIEF_SEED repeats one that failed.
    """
    print(f"DISTBELIEF_KILLS={KILLS} DISTBELIEF_SEED={SEED}")
    chance = random.Random(SEED)
    job = [JOB, *LARGE, "--set", "brake_s=0.1", "--set", f"steps={50 * KILLS + 100}"]
    run_dir, brake = tmp_path / "run", tmp_path / "brake"
    brake.touch()
    workers = chance.randint(1, 4)
    run = start("train", *job, "--run-dir", "run", "--save-every", 3, "--workers", workers, "--json")
    killed_in_a_save = 0
    moments = [("starting", "training", "saving")[number % 3] for number in range(KILLS)]
    chance.shuffle(moments)
    while moments:
        unfinished, before = unsealed(run_dir), step(run_dir)
        match moments.pop():
            case "starting":
                until((run_dir / "launch.json").exists, run)
                time.sleep(chance.uniform(0, 3))
                kill_everything(run, chance)
            case "training":
                wanted = before + chance.randint(1, 20)
                until(lambda wanted=wanted: step(run_dir) >= wanted, run)
                kill_everything(run, chance)
            case "saving":
                until(lambda before=before: step(run_dir) > before, run)
                found = processes_of(run.mark)  # takes longer than a save
                until(lambda unfinished=unfinished: unsealed(run_dir) - unfinished, run)
                kill_all(found, chance)
                kill_everything(run, chance)
                killed_in_a_save += bool(unsealed(run_dir) - unfinished)
        if not moments and not killed_in_a_save:
            moments.append("saving")
        workers = chance.choice([number for number in (1, 2, 3, 4) if number != workers])
        if not moments:
            brake.unlink()
        run = start("resume", "run", "--workers", workers, "--json")
    result = run.wait().json
    assert result["weights_sha256"] == undisturbed(*job)
    assert result["workers"] == workers
    check_whole(run_dir, result)
    assert killed_in_a_save


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was killed when it had checkpoints of steps 5 and 10, and of no others."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "hold").write_text("12")
    shares = ["--save-every", 5, "--keep-last", 100, "--workers", 2, "--run-dir", "run"]
    run = Run(folder, "train", *SIXTY, *shares)
    try:
        until(lambda: len(sealed(folder / "run")) >= 2, run)
    finally:
        kill_everything(run)
    return folder


@pytest.fixture
def run_dir(killed: Path, tmp_path: Path) -> Path:
    """A copy of that run: nothing slows it down here."""
    shutil.copytree(killed / "run", tmp_path / "run", ignore=shutil.ignore_patterns("*.sock"))
    return tmp_path / "run"


def weights() -> str:
    return undisturbed(*SIXTY)


@pytest.mark.parametrize(("workers", "strategy"), [(1, "allreduce"), (3, "allreduce:gloo")])
def test_a_damaged_checkpoint_is_named_skipped_and_replaced(
    distbelief: Cli, run_dir: Path, workers: int, strategy: str
) -> None:
    """On one worker, and on several with gloo, which used shared memory before."""
    newest, older, *_ = sealed(run_dir)
    part = damage(run_dir, newest)
    outcome = distbelief("resume", "run", "--workers", workers, "--strategy", strategy, "--json")
    assert f"skipped: {part} is damaged: its checksum differs" in outcome.stderr
    assert f"the run goes on from step {older}" in outcome.stderr
    assert outcome.json["weights_sha256"] == weights()
    check_whole(run_dir, outcome.json)
    left = sealed(run_dir)
    assert [verify(run_dir / "checkpoints", number).step for number in left] == left
    # It is saved again, unless others of several members have a newer one to write before this one is out of the way.
    assert newest in left or workers > 1
    transport = "gloo" if strategy == "allreduce:gloo" else "shm"
    assert records(run_dir, "generation", "journal.jsonl")[-1]["transport"] == transport


def test_saving_goes_on_at_once(start: Start, run_dir: Path, tmp_path: Path) -> None:
    """The checkpoint that it goes on from needs no saving, and holds up no other."""
    newest = sealed(run_dir)[0]
    (tmp_path / "hold").write_text(str(newest + 7))  # the members stay there until the first save is finished
    run = start("resume", "run", "--workers", 3)
    until(lambda: newest + 5 in sealed(run_dir), run)
    assert [text for text in notices(run_dir) if "is not saved" in text] == []
    (tmp_path / "hold").unlink()
    assert run.wait().status == 0
    assert sealed(run_dir)[0] == 60


def test_when_all_checkpoints_are_damaged(distbelief: Cli, run_dir: Path) -> None:
    parts = [damage(run_dir, number) for number in sealed(run_dir)]
    outcome = distbelief("resume", "run")
    assert outcome.status == 1
    assert outcome.stderr.count("error:") == 1
    assert f"{parts[0]} is damaged: its checksum differs" in outcome.stderr
    assert "Traceback" not in outcome.stdout + outcome.stderr


def test_a_job_that_has_changed_since_is_refused(distbelief: Cli, run_dir: Path, tmp_path: Path) -> None:
    changed = tmp_path / "stored.py"
    changed.write_text(JOB.read_text().replace("width: int = 8", "width: int = 9"))
    launch = run_dir / "launch.json"
    launch.write_text(launch.read_text().replace(str(JOB), str(changed)))
    outcome = distbelief("resume", "run")
    assert outcome.status == 1
    assert outcome.stderr.count("error:") == 1
    assert "parameters, the run's has" in outcome.stderr
    assert "Traceback" not in outcome.stdout + outcome.stderr

    changed.write_text(JOB.read_text())  # it is mended, and the run is none the worse for it
    outcome = distbelief("resume", "run", "--json")
    assert outcome.json["weights_sha256"] == weights()
    check_whole(run_dir, outcome.json)


def test_gloo_before_and_after(start: Start, distbelief: Cli, tmp_path: Path) -> None:
    job = [JOB, *SLOW, "--set", "steps=60"]
    (tmp_path / "brake").touch()
    run = start("train", *job, "--run-dir", "run", "--save-every", 5, "--workers", 3, "--strategy", "allreduce:gloo")
    until(lambda: sealed(tmp_path / "run"), run)
    kill_everything(run)
    (tmp_path / "brake").unlink()
    outcome = distbelief("resume", "run", "--workers", 2, "--json")
    assert outcome.json["weights_sha256"] == undisturbed(*job)
    check_whole(tmp_path / "run", outcome.json)
    assert {entry["transport"] for entry in records(tmp_path / "run", "generation", "journal.jsonl")} == {"gloo"}


def test_a_complete_run_is_left_alone(distbelief: Cli, tmp_path: Path) -> None:
    result = distbelief("train", JOB, "--run-dir", "run", "--workers", 2, "--json").json
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    again = distbelief("resume", "run", "--workers", 3, "--json")
    assert "the run is complete" in again.stderr
    same = ("weights_sha256", "steps", "loss", "metrics", "workers")
    assert {key: again.json[key] for key in same} == {key: result[key] for key in same}
    told = distbelief("resume", "run")
    assert (told.status, result["weights_sha256"] in told.stdout) == (0, True)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == files


def test_a_running_run_is_not_disturbed(start: Start, distbelief: Cli, tmp_path: Path) -> None:
    (tmp_path / "hold").write_text("30")
    run = start("train", *SIXTY, "--run-dir", "run", "--workers", 2, "--json")
    until(lambda: step(tmp_path / "run"), run)
    launch = (tmp_path / "run" / "launch.json").read_bytes()
    outcome = distbelief("resume", "run", "--workers", 3)
    assert (outcome.status, outcome.stdout) == (1, "")
    assert outcome.stderr.startswith("error: the run in run is running\n")
    assert (tmp_path / "run" / "launch.json").read_bytes() == launch
    (tmp_path / "hold").unlink()
    result = run.wait().json
    assert (result["weights_sha256"], result["workers"]) == (weights(), 2)


@pytest.mark.parametrize(
    ("what", "words"),
    [("missing", "there is no missing"), ("empty", "empty is no run directory: there is no launch.json in it")],
)
def test_what_is_no_run(distbelief: Cli, tmp_path: Path, what: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    outcome = distbelief("resume", what, "--json")
    assert outcome.status == 1
    assert json.loads(outcome.stdout) == {"error": words}
    assert list((tmp_path / "empty").iterdir()) == []


SCRIPT = """
import os, sys, time, torch, distbelief
x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
def loss(output, target):
    if os.path.exists("brake"):
        time.sleep(0.3)
    return torch.nn.functional.mse_loss(output, target)
job = distbelief.Job(
    model=lambda: torch.nn.Linear(6, 1), loss=loss, data=(x, x.sum(1, keepdim=True)), global_batch=16, steps=60,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
)
match sys.argv[-1]:
    case "train":
        distbelief.train(job, workers=2, run_dir="run", save_every=5, quiet=True)
    case "resume":
        result = distbelief.resume("run", job, workers=3, quiet=True)
        alone = distbelief.train(job, workers=1, run_dir="alone", save_every="never", quiet=True)
        print(result.steps, result.weights_sha256 == alone.weights_sha256)
"""


def test_a_job_of_a_python_program(start: Start, distbelief: Cli, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    program = [sys.executable, "script.py"]  # what follows it are arguments that it does not read, but for the last
    (tmp_path / "brake").touch()
    run = start("train", prefix=program)
    until(lambda: sealed(tmp_path / "run"), run)
    run.signal(signal.SIGTERM)
    stopped = run.wait()
    assert stopped.status != 0
    assert "RunInterrupted: stopped by SIGTERM; the newest checkpoint is of step" in stopped.stderr

    outcome = distbelief("resume", "run")
    assert (outcome.status, outcome.stdout) == (2, "")
    assert "the job of run came from a Python program" in outcome.stderr
    assert "distbelief.resume(run_dir, job)" in outcome.stderr

    (tmp_path / "brake").unlink()
    resumed = start("resume", prefix=program).wait()
    assert resumed.status == 0, resumed.stderr
    assert resumed.stdout == "60 True\n"
    assert "the run goes on from step" in "".join(notices(tmp_path / "run"))
