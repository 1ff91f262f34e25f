"""Bad input: one clear message, a non-zero exit, no hang, and nothing left behind (the fixture checks that)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runs.command import JOBS, Outcome

Cli = Callable[..., Outcome]


def expect(outcome: Outcome, status: int, *texts: str) -> None:
    said = outcome.stdout + outcome.stderr
    assert outcome.status == status, said
    for text in texts:
        assert text in said, said
    assert said.count("error:") == 1, said


@pytest.mark.parametrize(
    ("fault", "status", "texts"),
    [
        ("model", 1, ["worker 2 on", "ValueError: boom in the model", "(step 0, shard 3)", "in forward", "Traceback"]),
        ("nan", 1, ["the loss is nan at step 0, shard 0", "not applied"]),
        (
            "schedule",
            1,
            ["worker ", "`schedule` failed at step 3: ZeroDivisionError: division by zero\n", "in <lambda>"],
        ),
        ("empty", 2, ["the data set is empty"]),
        ("memory", 1, ["not enough memory", "GiB are needed", "GiB are free"]),
        ("reader-dies", 1, ["reader process", "SIGKILL", "17"]),
        ("reader-raises", 1, ["reading sample 17 failed: KeyError", "in __getitem__"]),
    ],
)
def test_a_job_that_fails(distbelief: Cli, fault: str, status: int, texts: list[str]) -> None:
    """One of each kind; all jobs that are refused while they are loaded are in unit/worker/test_worker_loading.py."""
    expect(distbelief("train", JOBS / "broken.py", "--set", f"fault={fault}", "--workers", 3), status, *texts)


@pytest.mark.parametrize(
    ("arguments", "status", "texts"),
    [
        (["missing.py"], 2, ["no such job file"]),
        ([JOBS / "small.py", "--set", "stepz=3"], 2, ["stepz", "did you mean `steps`"]),
        ([JOBS / "small.py", "--strategy", "allredude"], 2, ["unknown strategy", "allreduce"]),
        ([JOBS / "small.py", "--run-dir", "/proc/nowhere"], 1, ["cannot write to the run directory"]),
    ],
)
def test_a_wrong_command(distbelief: Cli, arguments: list[object], status: int, texts: list[str]) -> None:
    expect(distbelief("train", *arguments, "--workers", 2), status, *texts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("def job(:\n", "syntax error"), ("1 / 0\n", "ZeroDivision")],
)
def test_a_broken_job_file(distbelief: Cli, tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "broken_file.py").write_text(text)
    expect(distbelief("train", "broken_file.py", "--workers", 2), 2, expected)


def test_a_run_directory_that_holds_a_run(distbelief: Cli, tmp_path: Path) -> None:
    assert distbelief("train", JOBS / "small.py", "--workers", 1, "--run-dir", "mine").status == 0
    weights = (tmp_path / "mine" / "weights.safetensors").read_bytes()
    expect(distbelief("train", JOBS / "small.py", "--workers", 1, "--run-dir", "mine"), 1, "is not empty")
    assert (tmp_path / "mine" / "weights.safetensors").read_bytes() == weights


def test_more_workers_than_shards_is_no_error(distbelief: Cli) -> None:
    outcome = distbelief("train", JOBS / "small.py", "--workers", 6, "--set", "shards=4")
    assert outcome.status == 0, outcome
    assert "6 workers for 4 shards" in outcome.stdout
    assert "spare" in outcome.stdout
