"""Texts of any length and any characters come from users' code: each is reported, none hangs or hides the run's end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runs.command import JOBS, Outcome

Cli = Callable[..., Outcome]

TRAINING = 7
"""This call of the loss is in a step: a worker computes a few shards while it loads the job (the purity check)."""


def outcome_of(distbelief: Cli, fault: str, *more: object) -> Outcome:
    job = [JOBS / "speaks.py", "--set", f"fault={fault}", *more]
    return distbelief("train", *job, "--workers", 2, "--run-dir", "run")


def log_of(tmp_path: Path, text: str) -> Path:
    """The log that the text names."""
    (found,) = {path for path in (tmp_path / "run" / "logs").glob("worker-*.log") if f"logs/{path.name}" in text}
    return found


@pytest.mark.parametrize(
    ("fault", "at", "texts"),
    [
        ("long", TRAINING, ["ValueError: aaa", "50.0 MB cut"]),
        ("long", 1, ["ValueError: aaa", "aaa the end", " … 50.0 MB cut; the whole is in logs/worker-"]),
        (
            "deep",
            TRAINING,
            ["ZeroDivisionError: division by zero", "in there", " MB cut; the whole is in logs/worker-"],
        ),
        ("characters", 1, ["ValueError: bad \\udcff and \\x00 and é"]),
        ("mute", TRAINING, ["Mute: (its text cannot be shown: its __str__ raised RuntimeError)", "in loss"]),
    ],
)
def test_an_exception(distbelief: Cli, tmp_path: Path, fault: str, at: int, texts: list[str]) -> None:
    """While the job is loaded, and while it trains."""
    outcome = outcome_of(distbelief, fault, "--set", f"at={at}")
    said = outcome.stdout + outcome.stderr
    assert (outcome.status, said.count("error:")) == (1, 1), said[-3000:]
    for text in texts:
        assert text in said, said[-3000:]
    assert len(said) < 100_000
    if fault in ("long", "deep"):
        whole = log_of(tmp_path, said).read_text()
        assert whole.count("a" * 50_000_000 + " the end" if fault == "long" else "in there") >= 1
        assert len(whole) > 3_000_000


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("name", "is too long or has characters that cannot be printed"),
        ("name-characters", "the metric name 'bad \\udcff' is too long or has"),
        ("values", "the metrics of one evaluation are 100,001 numbers"),
    ],
)
def test_metrics(distbelief: Cli, fault: str, text: str) -> None:
    outcome = outcome_of(distbelief, fault)
    assert (outcome.status, text in outcome.stderr) == (2, True), outcome.stderr[-3000:]
    assert len(outcome.stderr) < 5000


def test_a_line_of_output(distbelief: Cli, tmp_path: Path) -> None:
    outcome = outcome_of(distbelief, "line")
    assert (outcome.status, len(outcome.stdout) < 20_000) == (0, True), outcome.stderr
    assert "bbb … a long line is cut; the whole is in logs/worker-" in outcome.stdout
    assert sum(path.read_text().count("b") for path in (tmp_path / "run" / "logs").glob("worker-*.log")) >= 100_000_000


def test_the_value_of_a_hyperparameter(distbelief: Cli) -> None:
    outcome = outcome_of(distbelief, "c" * 70_000)
    assert (outcome.status, "--set values are longer" in outcome.stderr) == (2, True), outcome.stderr[-3000:]
