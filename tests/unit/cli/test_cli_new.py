"""`distbelief new`: the starter job, and the names it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distbelief.cli.main import app
from distbelief.worker.jobfile import load_job


def new(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["new", *arguments])


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_it_writes_a_job_and_says_what_to_run() -> None:
    result = new("spirals")
    assert result.exit_code == 0
    assert result.stdout == "wrote spirals.py\nnow run: distbelief train spirals.py --workers 2\n"
    text = Path("spirals.py").read_text()
    assert "distbelief train spirals.py --set" in text
    assert "@FILE@" not in text


def test_the_starter_is_a_job_with_hyperparameters() -> None:
    new("spirals.py")
    job = load_job(Path("spirals.py"), {"lr": "0.01", "width": "8"})
    assert job.name == "spirals"
    assert job.epochs
    assert list(job.metrics) == ["accuracy"]
    model = job.model()
    points, arms = job.data
    assert job.loss(model(points[:8]), arms[:8]).isfinite()  # type: ignore[union-attr]
    assert sum(p.numel() for p in model.parameters()) == 2 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3


def test_the_starter_learns_in_a_plain_loop() -> None:
    import torch

    new("spirals")
    job = load_job(Path("spirals.py"), {})
    torch.manual_seed(0)
    model = job.model()
    optimizer = job.optimizer(list(model.parameters()))
    points, arms = job.data
    for _ in range(int(job.epochs or 0)):
        for batch in torch.split(torch.randperm(len(points)), job.global_batch):
            optimizer.zero_grad()
            job.loss(model(points[batch]), arms[batch]).backward()  # type: ignore[union-attr]
            optimizer.step()
    points, arms = job.validation
    assert (model(points).argmax(1) == arms).float().mean() > 0.95


def test_the_starter_is_clean_code() -> None:
    new("spirals")
    for command in (["check", "--select", "E,F,I,B,UP,SIM,RUF"], ["format", "--check"]):
        options = ["--isolated", "--line-length", "120", "spirals.py"]
        done = subprocess.run([sys.executable, "-m", "ruff", *command, *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_it_never_overwrites() -> None:
    Path("mine.py").write_text("precious")
    result = new("mine")
    assert result.exit_code == 2
    assert "exists already" in result.stderr
    assert Path("mine.py").read_text() == "precious"


def test_the_name_may_be_a_path() -> None:
    Path("my jobs").mkdir()
    result = new("my jobs/first-try")
    assert result.exit_code == 0
    assert Path("my jobs/first-try.py").exists()
    assert "distbelief train 'my jobs/first-try.py'" in result.stdout
    missing = new("nowhere/x")
    assert missing.exit_code == 2
    assert "mkdir -p nowhere" in missing.stderr


@pytest.mark.parametrize("name", ["2nd", "a b", "job.yaml", "", ".", "..", "x/", "a!b", ".py", "x.py/"])
def test_names_that_cannot_work_are_explained(name: str) -> None:
    result = new(name)
    assert result.exit_code == 2
    assert "cannot name a job file" in result.stderr
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("name", ["random", "torch", "distbelief.py"])
def test_names_that_would_hide_a_module_are_refused(name: str) -> None:
    result = new(name)
    assert result.exit_code == 2
    assert "would hide the Python module" in result.stderr


def test_a_folder_that_cannot_be_written() -> None:
    result = new("/proc/self/job_here")
    assert result.exit_code == 2
    assert "cannot write /proc/self/job_here.py" in result.stderr
