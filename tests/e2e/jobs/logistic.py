"""Logistic regression on the handwritten digits: convex, so that every minimiser comes to the same loss. While there is
a file `brake`, a portion takes longer."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from distbelief import Job, accuracy

WEIGHT_DECAY = 1e-3


class Logistic(nn.Module):
    def __init__(self, brake_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.brake_s = brake_s

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.brake_s and Path("brake").exists():
            time.sleep(self.brake_s)
        # The penalty is made of the parameters, so that the loss is all there is to be minimised.
        penalty = 0.5 * WEIGHT_DECAY * self.linear.weight.square().sum()
        return torch.cat([self.linear(images), penalty.expand(len(images), 1)], dim=1)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output[:, :10], target) + output[:, 10].mean()


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """scikit-learn's file, without scikit-learn, whose import takes longer than the rest of the test."""
    sklearn = importlib.util.find_spec("sklearn")
    assert sklearn is not None
    assert sklearn.origin is not None
    table = np.loadtxt(Path(sklearn.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return torch.tensor(table[:, :-1], dtype=torch.float32).div(16), torch.tensor(table[:, -1], dtype=torch.int64)


def job(steps: int = 30, brake_s: float = 0.0, every: int = 10) -> Job:
    images, target = load()
    return Job(
        name="logistic",
        model=lambda: Logistic(brake_s),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=(images[:1500], target[:1500]),
        validation=(images[1500:], target[1500:]),
        metrics={"accuracy": lambda output, target: accuracy(output[:, :10], target)},
        global_batch=256,
        steps=steps,
        evaluate_every=every,
    )
