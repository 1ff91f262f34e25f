"""Machines that compute wrongly, played by a hook on a gradient: named, and never in the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runs.command import JOBS, Outcome
from tests.support.runs.reference import undisturbed
from tests.support.runs.watched import of_kinds

Cli = Callable[..., Outcome]
FLIPPING = JOBS / "flipping.py"


def victim(folder: Path) -> str:
    """The name of the worker with the flipped bit."""
    pid = int((folder / "claimed").read_text())
    [generation] = of_kinds(folder / "run" / "journal.jsonl", "generation")
    [number] = [member["worker"] for member in generation["members"] if member["pid"] == pid]
    return f"worker {number} on "


@pytest.mark.parametrize("strategy", ["allreduce:shm", "allreduce:gloo", "ps:sync"])
def test_one_flipped_bit_in_200_steps_does_not_get_into_the_weights(
    distbelief: Cli, tmp_path: Path, strategy: str
) -> None:
    options = ["--workers", 2, "--strategy", strategy, "--recheck", "all", "--run-dir", "run", "--json"]
    ended = distbelief("train", FLIPPING, "--set", "flips=once", *options)
    assert ended.json["weights_sha256"] == undisturbed(FLIPPING)
    notices = [one["text"] for one in of_kinds(tmp_path / "run" / "metrics.jsonl", "notice")]
    [found] = [text for text in notices if "computed wrong gradients of shard" in text]
    assert found.startswith(victim(tmp_path))


def test_a_worker_whose_every_gradient_has_a_flipped_bit_is_named_at_the_default_rate(
    distbelief: Cli, tmp_path: Path
) -> None:
    job = [FLIPPING, "--set", "flips=always", "--set", "steps=5000"]
    ended = distbelief("train", *job, "--workers", 3, "--run-dir", "run", "--save-every", "never")
    assert ended.status == 1
    assert f"{victim(tmp_path)}" in ended.stderr
    said = " ".join(ended.stderr.split())
    assert "computed other gradients of shard" in said
    assert "layers.0.weight" in said
    assert "was not committed" in said
    steps = [one["step"] for one in of_kinds(tmp_path / "run" / "metrics.jsonl", "step")]
    assert f"of step {max(steps) + 1} " in said, "the step itself was not committed, and all before it were reported"
