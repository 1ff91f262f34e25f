"""Logistic regression on the handwritten digits: convex, so that every minimiser comes to the same loss. While there is
a file `brake`, a portion takes longer."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
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


def job(steps: int = 30, brake_s: float = 0.0, every: int = 10) -> Job:
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32).div(16)
    target = torch.tensor(digits.target, dtype=torch.int64)
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
