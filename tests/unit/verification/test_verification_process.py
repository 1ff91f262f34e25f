"""The plain loop in its own process: what it leaves, and how its failures are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from distbelief.errors import JobError, RunFailed
from distbelief.verification.process import run_plain

JOB = """
import os, signal, sys, torch
from distbelief import Job

def loss(output, target):
    print("in the loss")
    if FAULT == "raise":
        raise ValueError("my own mistake")
    if FAULT == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.functional.mse_loss(output, target)

FAULT = ""

def job(fault: str = "", steps: int = 5):
    global FAULT
    FAULT = fault
    X = torch.randn(16, 3)
    return Job(
        model=lambda: torch.nn.Linear(3, 3), loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        data=(X, X), global_batch=8, steps=steps,
    )
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


def test_it_leaves_what_a_run_leaves(job: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_plain(job, {"steps": "9"}, 3, tmp_path / "out")
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [(record["kind"], record["step"]) for record in records] == [("step", 0), ("step", 1), ("step", 2)]
    assert records[2]["loss"] < records[0]["loss"]
    assert set(load_file(tmp_path / "out" / "weights.safetensors")) == {"weight", "bias"}
    assert (tmp_path / "out" / "plain.log").read_text().startswith("in the loss\n")
    assert capfd.readouterr() == ("", "")  # what the job prints is in the log alone


def test_an_exception_of_the_job(job: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="the plain process: ValueError: my own mistake") as raised:
        run_plain(job, {"fault": "raise"}, 3, tmp_path / "out")
    assert 'raise ValueError("my own mistake")' in raised.value.details


def test_a_wrong_setting(job: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no hyper-parameter `step`"):
        run_plain(job, {"step": "3"}, 3, tmp_path / "out")


def test_a_death(job: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="was killed by signal 9") as raised:
        run_plain(job, {"fault": "die"}, 3, tmp_path / "out")
    assert str(tmp_path / "out" / "plain.log") in raised.value.hint
