"""Against one plain PyTorch process, written out here. Only the order of samples and the seeds are looked up in the
system; the loop itself has no code of ours.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from distbelief.shards import shard_seed
from tests.e2e.jobs import plain
from tests.support.runs.command import JOBS, Outcome
from tests.support.runs.plainloop import clip_weights, samples_of, seed_all, tree_sum

Cli = Callable[..., Outcome]


def plain_loop(model: torch.nn.Module) -> list[float]:
    """Train over the shards with their seeds, adding gradients along the tree. Returns the losses."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=5e-3, weight_decay=0.05, fused=True)
    floats = [b for b in model.buffers() if b.is_floating_point()]
    losses = []
    for step in range(plain.STEPS):
        before = copy.deepcopy(list(model.buffers()))
        gradients, buffers, sums, count = [], [], [], 0
        for shard in range(plain.SHARDS):
            index = samples_of(step, shard)
            if len(index) == 0:
                continue
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
            seed_all(shard_seed(plain.SEED, step, shard))
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(plain.X[index]), plain.Y[index]) * len(index)
            loss.backward()
            gradients.append([p.grad for p in parameters])
            buffers.append([b.clone() for b in floats])
            sums.append(loss.item())
            count += len(index)
        for buffer, total in zip(floats, tree_sum(buffers), strict=True):
            buffer.copy_(total / len(buffers))
        for parameter, total in zip(parameters, tree_sum(gradients), strict=True):
            parameter.grad = total * (1.0 / count)
        norm = sum(float(p.grad.double().square().sum()) for p in parameters) ** 0.5
        for parameter in parameters:
            parameter.grad.mul_(min(1.0, plain.CLIP / (norm + 1e-6)))
        optimizer.param_groups[0]["lr"] = 5e-3 * plain.rate(step)
        optimizer.step()
        clip_weights(model)
        losses.append(sum(sums) / count)
    return losses


def losses_of(run_dir: Path) -> list[float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]


def test_the_same_bits_as_a_plain_loop(distbelief: Cli, tmp_path: Path) -> None:
    seed_all(plain.SEED)
    model = plain.Net().train()
    losses = plain_loop(model)
    distbelief("train", JOBS / "plain.py", "--workers", 3, "--run-dir", tmp_path / "run", "--json").json  # noqa: B018
    weights = load_file(tmp_path / "run" / "weights.safetensors")
    for name, value in model.state_dict().items():
        assert torch.equal(weights[name], value), f"{name} differs by {(weights[name] - value).abs().max()}"
    assert losses_of(tmp_path / "run") == pytest.approx(losses, rel=1e-12)


def full_batch_loop() -> list[float]:
    seed_all(plain.SEED)
    model = plain.Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)
    losses = []
    for step in range(plain.STEPS):
        index = torch.cat([samples_of(step, shard) for shard in range(plain.SHARDS)])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(plain.X[index]), plain.Y[index])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plain.CLIP)
        optimizer.param_groups[0]["lr"] = 5e-3 * plain.rate(step)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("strategy", "close"), [("allreduce", 1e-5), ("allreduce:bf16:always", 5e-3)])
def test_the_loss_curve_of_the_ordinary_full_batch_loop(
    distbelief: Cli, tmp_path: Path, strategy: str, close: float
) -> None:
    arguments = [
        "--set",
        "simple=true",
        "--workers",
        2,
        "--strategy",
        strategy,
        "--run-dir",
        tmp_path / "run",
        "--json",
    ]
    distbelief("train", JOBS / "plain.py", *arguments).json  # noqa: B018
    losses = full_batch_loop()
    assert losses_of(tmp_path / "run") == pytest.approx(losses, rel=close)
    if strategy != "allreduce":
        assert losses_of(tmp_path / "run") != pytest.approx(losses, rel=1e-5), "it was not compressed"
