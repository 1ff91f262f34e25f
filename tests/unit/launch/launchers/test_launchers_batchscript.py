"""The script for sbatch, run by a real bash with programs of our own in the place of Slurm's."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distbelief.coordinator.journal import Journal
from distbelief.errors import DistBeliefError
from distbelief.launch.launchers.rules.batchscript import Batch, script

SRUN = """#!/bin/bash
printf '%s\\n' "$@" > srun.args
trap 'exit {on_term}' TERM
echo $$ > srun.draft
mv srun.draft srun.up
while [ ! -e srun.go ]; do sleep 0.02; done
exit {at_end}
"""
SCANCEL = """#!/bin/bash
printf '%s\\n' "$@" > scancel.args
kill -TERM "$(cat srun.up)"
"""
NOTES = """#!/bin/bash
printf '%s\\n' "$@" > scontrol.args
"""


def write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def start(folder: Path, batch: Batch, on_term: int = 143, at_end: int = 0) -> subprocess.Popen[bytes]:
    bin_dir = folder / "bin"
    bin_dir.mkdir()
    write(bin_dir / "srun", SRUN.format(on_term=on_term, at_end=at_end))
    write(bin_dir / "scancel", SCANCEL)
    write(bin_dir / "scontrol", NOTES)
    text = script(batch, ["/venv/bin/python", "-m", "distbelief"], "/jobs/my job.py", "", ["--set", "name=a b"])
    write(folder / "run.sbatch", text)
    environment = {**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}", "SLURM_JOB_ID": "41"}
    process = subprocess.Popen([folder / "run.sbatch"], cwd=folder, env=environment)
    until = time.monotonic() + 300
    while not (folder / "srun.up").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    return process


def arguments(folder: Path, program: str) -> list[str]:
    return (folder / f"{program}.args").read_text().splitlines()


def test_the_first_turn_trains(tmp_path: Path) -> None:
    process = start(tmp_path, Batch("my job", nodes=3, workers_per_node=2), at_end=7)
    (tmp_path / "srun.go").touch()
    assert process.wait(60) == 7
    words = arguments(tmp_path, "srun")
    assert words[words.index("/venv/bin/python") :] == [
        *("/venv/bin/python", "-m", "distbelief", "train", "/jobs/my job.py", "--on", "slurm", "--workers", "6"),
        *("--plain", "--set", "name=a b", "--run-dir", "runs/my job-slurm-41"),
    ]
    assert not (tmp_path / "scontrol.args").exists()


def test_a_turn_that_never_trained_is_repeated_with_the_arguments_of_now(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "my job-slurm-41"
    run.mkdir(parents=True)
    (run / "launch.json").touch()
    Journal.open(run / "journal.jsonl").close()
    process = start(tmp_path, Batch("my job", nodes=1))
    (tmp_path / "srun.go").touch()
    assert process.wait(60) == 0
    assert "train" in arguments(tmp_path, "srun")


def test_a_later_turn_resumes(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "my job-slurm-41"
    run.mkdir(parents=True)
    with Journal.open(run / "journal.jsonl") as journal:
        journal.append({"kind": "generation", "generation": 1})
    process = start(tmp_path, Batch("my job", nodes=1, workers_per_node=8))
    (tmp_path / "srun.go").touch()
    assert process.wait(60) == 0
    words = arguments(tmp_path, "srun")
    assert words[words.index("resume") :] == [
        *("resume", "runs/my job-slurm-41", "--on", "slurm", "--workers", "8", "--plain"),
    ]


@pytest.mark.parametrize(("status", "requeued"), [(143, True), (0, False), (1, False)])
def test_when_its_time_is_up_the_run_is_told_and_only_one_that_stopped_is_queued_again(
    tmp_path: Path, status: int, requeued: bool
) -> None:
    process = start(tmp_path, Batch("digits", nodes=1), on_term=status)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == status
    assert arguments(tmp_path, "scancel") == ["--signal=TERM", "41.0"]
    assert (tmp_path / "scontrol.args").exists() == requeued
    if requeued:
        assert arguments(tmp_path, "scontrol") == ["requeue", "41"]


@pytest.mark.parametrize("run_dir", ["", "/shared/my runs/it's here"])
def test_shellcheck_finds_nothing(tmp_path: Path, run_dir: str) -> None:
    file = tmp_path / "run.sbatch"
    file.write_text(script(Batch("a b(c)", nodes=2, time="2-0"), ["py thon"], "/a'b.py", run_dir, ["--set", "x=y z"]))
    subprocess.run([Path(sys.executable).with_name("shellcheck"), file], check=True)


def test_what_is_asked_of_slurm() -> None:
    batch = Batch("g!pt", nodes=4, workers_per_node=2, threads=3, gpus=True, time="1-12:00", partition="long")
    asked = {line.removeprefix("#SBATCH --") for line in batch.directives()}
    assert {"nodes=4", "ntasks-per-node=1", "cpus-per-task=6", "gpus-per-node=2", "time=1-12:00"} <= asked
    assert {"job-name=g-pt", "partition=long", "requeue", "no-kill", "signal=B:USR1@120"} <= asked


@pytest.mark.parametrize("wrong", [{"time": "soon"}, {"time": "1:2"}, {"partition": "a\n#SBATCH --x"}])
def test_what_slurm_would_not_take(wrong: dict[str, str]) -> None:
    with pytest.raises(DistBeliefError):
        Batch("x", nodes=1, **wrong)  # type: ignore[arg-type]
