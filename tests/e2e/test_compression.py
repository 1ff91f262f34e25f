"""Whole runs whose gradients are compressed: they learn as well, survive deaths, and resume with what they owe."""

from __future__ import annotations

import functools
import json
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distbelief.checkpoint.reading import read_manifest, read_tensors
from tests.support.runs.command import JOBS, Outcome, Run
from tests.support.runs.saved import JOB, LARGE, kill_everything, records, sealed, until
from tests.support.runs.watched import Watched

Start = Callable[..., Run]
Cli = Callable[..., Outcome]
Wait = Callable[[Callable[[], object]], None]

DIGITS = [JOBS / "digits.py", "--set", "epochs=5", "--workers", 2, "--save-every", "never"]
SLOWER = ["--set", "brake_s=0.05"]
METHODS = {
    "int8": 0.27,
    "powersgd=4": 0.15,
}  # one of each kind: codes of numbers, and of matrices; all are measured in bench/


@functools.cache
def trained(strategy: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), "train", *DIGITS, "--strategy", strategy, "--json")
        result = run.wait().json
        assert run.leftovers() == []
    return result


@pytest.mark.parametrize(("method", "most"), METHODS.items())
def test_digits_are_learnt_to_within_a_point_with_fewer_bytes(method: str, most: float) -> None:
    plain, compressed = trained("allreduce:inexact:gloo"), trained(f"allreduce:{method}:always")
    assert compressed["metrics"]["accuracy"] >= plain["metrics"]["accuracy"] - 0.01
    assert plain["wire_ratio"] is None
    assert 0 < compressed["wire_ratio"] < most


def test_the_summary_and_the_metrics_say_how_much_was_sent(distbelief: Cli, tmp_path: Path) -> None:
    outcome = distbelief(
        "train", JOB, *LARGE, "--strategy", "allreduce:int8:always", "--workers", 2, "--run-dir", "run"
    )
    assert outcome.status == 0, outcome
    assert "on the wire: 25 % of the uncompressed bytes" in outcome.stdout
    assert "gradients are compressed (int8); they go over gloo, also between workers of one host" in outcome.stdout
    lines = records(tmp_path / "run", "workers")
    assert lines[-1]["workers"][0]["wire_ratio"] == pytest.approx(0.251, abs=0.01)
    plans = records(tmp_path / "run", "plan", "journal.jsonl")
    assert "gradients are compressed (int8)" in plans[0]["lines"][0]


def test_what_makes_no_sense_is_one_clear_error(distbelief: Cli) -> None:
    outcome = distbelief("train", JOB, "--strategy", "allreduce:topk=0.9", "--workers", 2)
    assert outcome.status != 0
    assert "top-k cannot send the fraction 0.9 of a vector" in outcome.stderr
    assert "Traceback" not in outcome.stdout + outcome.stderr


def test_a_kill_in_the_middle_goes_on(start: Start, tmp_path: Path, wait_until: Wait) -> None:
    arguments = [JOB, *SLOWER, "--set", "steps=300", "--workers", 3, "--strategy", "allreduce:powersgd=4:always"]
    run = Watched(start, tmp_path, wait_until, *arguments)
    run.after(10)
    run.has_members(3)
    run.signal(run.living()[1], signal.SIGKILL)
    run.after(run.step() + 20)
    result = run.result()
    assert result["recoveries"] >= 1
    assert result["steps"] == 300
    losses = [entry["loss"] for entry in run.metrics("step")]
    assert sum(losses[-10:]) < sum(losses[:10])


@pytest.fixture(scope="module", params=["topk=0.01", "powersgd=2"])
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[object]]:
    """A folder with a run of two workers that was killed when it had a checkpoint, and how the run was started."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "hold").write_text("12")
    how = ["--strategy", f"allreduce:{request.param}:always", "--no-balance", "--workers", 2]
    job = [JOB, "--set", "steps=40", "--set", "holds=true", *how]
    run = Run(folder, "train", *job, "--save-every", 5, "--run-dir", "run")
    try:
        until(lambda: len(sealed(folder / "run")) >= 2, run)
    finally:
        kill_everything(run)
    (folder / "hold").unlink()
    return folder, job


def test_a_resumed_run_has_the_bits_of_one_that_never_was(killed: tuple[Path, list[object]]) -> None:
    folder, job = killed
    resumed, smooth = Run(folder, "resume", "run", "--json"), None
    found = resumed.wait().json
    smooth = Run(folder, "train", *job, "--run-dir", "smooth", "--json").wait().json
    assert found["weights_sha256"] == smooth["weights_sha256"]
    assert found["wire_ratio"] < 1
    manifest = read_manifest(folder / "run" / "checkpoints", 40)
    owed = {name: t for name, t in read_tensors(folder / "run" / "checkpoints", manifest).items() if "residual" in name}
    assert {name.split("/")[2] for name in owed} == {"0", "1"}, "each member's own"
    assert any(bool(tensor.any()) for tensor in owed.values())


def test_other_strategies_can_resume_it(distbelief: Cli, start: Start, tmp_path: Path) -> None:
    """What was owed is given up then; and a compressed run resumes one that was not."""
    for number, (first, then) in enumerate([("allreduce:int8", "allreduce"), ("allreduce", "allreduce:powersgd=2")]):
        run_dir = tmp_path / f"run{number}"
        (tmp_path / "hold").write_text("7")
        job = [
            JOB,
            "--set",
            "steps=30",
            "--set",
            "holds=true",
            "--workers",
            2,
            "--strategy",
            first,
            "--run-dir",
            run_dir,
        ]
        run = start("train", *job, "--save-every", 5)
        until(lambda run_dir=run_dir: sealed(run_dir), run)
        kill_everything(run)
        (tmp_path / "hold").unlink()
        result = distbelief("resume", run_dir, "--workers", 3, "--strategy", then, "--json").json
        assert result["steps"] == 30
        assert json.loads((run_dir / "job.json").read_text())["strategy"] == then
