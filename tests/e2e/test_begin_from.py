"""`--from`: a new run begins with the weights of another one, wherever they lie; or says why they do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from distbelief.data.rules.order import positions_to_samples
from tests.support.runs.command import Outcome, Run
from tests.support.runs.saved import JOB, check_whole, kill_everything, step, until

Start = Callable[..., Run]
Cli = Callable[..., Outcome]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps that has checkpoints of 6 and 12."""
    folder = tmp_path_factory.mktemp("source")
    run = Run(folder, "train", JOB, "--run-dir", "run", "--workers", 2, "--save-every", 6, "--json")
    assert run.wait().json["steps"] == 12
    assert run.leftovers() == []
    return folder / "run"


def one_step(distbelief: Cli, begin_from: Path, name: str) -> dict[str, Any]:
    """Another seed, and a learning rate of 0: what is trained stays as it was."""
    still = ["--set", "lr=0", "--set", "steps=1", "--set", "seed=7"]
    return distbelief("train", JOB, *still, "--from", begin_from, "--run-dir", name, "--workers", 2, "--json").json


def test_a_run_and_a_checkpoint(distbelief: Cli, source: Path, tmp_path: Path) -> None:
    newest = one_step(distbelief, source, "run")
    earlier = one_step(distbelief, source / "checkpoints/step-000000006", "earlier")
    assert earlier["weights_sha256"] != newest["weights_sha256"]

    before, after = load_file(source / "weights.safetensors"), load_file(tmp_path / "run" / "weights.safetensors")
    kept = ["enter.weight", "enter.bias", "padding", "head.weight", "middle.weight", "norm.weight"]  # two are frozen
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert int(after["norm.num_batches_tracked"]) == int(before["norm.num_batches_tracked"]) + 1 == 13
    assert torch.allclose(after["norm.running_mean"], expected_mean(before))
    assert int(load_file(tmp_path / "earlier" / "weights.safetensors")["norm.num_batches_tracked"]) == 7


def expected_mean(before: dict[str, torch.Tensor]) -> torch.Tensor:
    """BatchNorm goes on from the mean that it had, with that of the first batch: 0.9 · old + 0.1 · new."""
    torch.manual_seed(1)
    inputs = torch.randn(96, 6)
    batch = inputs[positions_to_samples(np.arange(16), 96, seed=7, epoch=0, shuffle=True)]
    entered = torch.nn.functional.linear(batch, before["enter.weight"], before["enter.bias"])
    return 0.9 * before["norm.running_mean"] + 0.1 * entered.mean(0)


def test_killed_before_its_first_checkpoint(start: Start, distbelief: Cli, source: Path, tmp_path: Path) -> None:
    """A resume begins with those weights again, in whatever folder it is called; and the file of a run's weights is as
    good as the run."""
    job = [JOB, "--set", "steps=20", "--set", "brake_s=0.1", "--set", "seed=7"]
    file = source / "weights.safetensors"
    expected = distbelief("train", *job, "--from", file, "--run-dir", "alone", "--workers", 1, "--json").json
    (tmp_path / "brake").touch()
    (tmp_path / "link").symlink_to(source)
    run = start("train", *job, "--from", "link", "--run-dir", "run", "--workers", 2, "--save-every", "end")
    until(lambda: step(tmp_path / "run"), run)
    kill_everything(run)
    (tmp_path / "brake").unlink()
    (tmp_path / "elsewhere").mkdir()
    elsewhere = ["sh", "-c", 'cd elsewhere && exec "$@"', "sh"]
    outcome = start("resume", "../run", "--workers", 3, "--json", prefix=elsewhere).wait()
    assert "there is no checkpoint in" in outcome.stderr
    assert outcome.json["weights_sha256"] == expected["weights_sha256"]
    check_whole(tmp_path / "run", outcome.json)


@pytest.mark.parametrize(
    ("setting", "texts"),
    [
        ("wide=65", ["model/padding: float32 [64] in the saved state, float32 [65] in the job"]),
        ("width=9", ["model/enter.weight", "[8, 6]", "[9, 6]"]),
    ],
    ids=["trained", "frozen"],
)
def test_weights_of_another_model(distbelief: Cli, source: Path, setting: str, texts: list[str]) -> None:
    outcome = distbelief("train", JOB, "--set", setting, "--from", source, "--run-dir", "run", "--workers", 2)
    assert outcome.status == 1
    assert outcome.stderr.count("error:") == 1
    assert "another model" in outcome.stderr
    assert all(text in outcome.stderr for text in texts)
    assert "Traceback" not in outcome.stdout + outcome.stderr


def test_weights_that_are_not_there(distbelief: Cli) -> None:
    outcome = distbelief("train", JOB, "--from", "missing", "--run-dir", "run", "--workers", 2)
    assert outcome.status != 0
    assert outcome.stderr.count("error:") == 1
    assert "there is no " in outcome.stderr
    assert "Traceback" not in outcome.stdout + outcome.stderr
