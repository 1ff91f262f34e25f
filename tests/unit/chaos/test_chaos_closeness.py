"""Weights of two run directories, compared as `verify` compares them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from distbelief.chaos.rules.verdict import Closeness, Evidence
from distbelief.chaos.trial import Plan, how_close

JOB = """
import torch
from distbelief import Job

def job(steps: int = 4) -> Job:
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    return Job(
        model=lambda: torch.nn.Linear(3, 1),
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        data=(x, x.sum(1, keepdim=True)),
        global_batch=8,
        shards=2,
        steps=steps,
    )
"""
WEIGHTS = {"weight": torch.tensor([[0.5, -1.0, 2.0]]), "bias": torch.tensor([0.25])}


def evidence(run_dir: Path, change: float) -> Evidence:
    run_dir.mkdir()
    moved = {**WEIGHTS, "weight": WEIGHTS["weight"] + torch.tensor([change, 0.0, 0.0])}
    save_file(moved, run_dir / "weights.safetensors")
    (run_dir / "job.json").write_text(json.dumps({"precision": "fp32"}))
    return Evidence(str(run_dir), 4, "", tuple({"kind": "step", "step": t, "loss": 1.0} for t in range(4)))


def compare(folder: Path, change: float) -> tuple[Closeness, str]:
    (folder / "job.py").write_text(JOB)
    plan = Plan(folder / "job.py", {}, 2, "sharded", folder)
    stream = io.StringIO()
    return how_close(
        plan, evidence(folder / "twin", 0.0), evidence(folder / "faults", change), stream
    ), stream.getvalue()


def test_the_same_bits_and_a_rounding_apart(tmp_path: Path) -> None:
    (tmp_path / "same").mkdir()
    assert compare(tmp_path / "same", 0.0) == (Closeness(True, 0.0), "")
    found, said = compare(tmp_path, 1e-6)
    assert found.equal
    assert 1e-7 < found.relative < 1e-6  # of the largest number of the tensor, 2
    assert said == ""


def test_beyond_the_tolerance_rounding_alone_is_looked_into(tmp_path: Path) -> None:
    found, said = compare(tmp_path, 0.01)
    assert not found.equal
    assert not found.noisy
    assert 0.004 < found.relative < 0.006
    assert said.count("the effect of rounding alone") == 2
    for name in ("plain", "nudged"):
        assert (tmp_path / name / "weights.safetensors").exists()
