"""Fashion-MNIST and a dense network, for curves of the loss: nothing random in the model, so that L-BFGS can train it
too. `epochs` counts passes over the images; with `iterations` a step is a pass of its own (sandblaster)."""

import math
from pathlib import Path

import torch
from torch import nn

from distbelief import Job, accuracy, idx

TESTED = 4000
POINTS = 24
"""Evaluations of a run."""


def network() -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers)


def job(
    folder: str, limit: int = 20_000, epochs: float = 4, iterations: int = 0, batch: int = 128, lr: float = 0.1,
    seed: int = 0,
) -> Job:  # fmt: skip
    source = Path(folder)
    images, classes = idx(source / "train-images-idx3-ubyte", source / "train-labels-idx1-ubyte")
    tests, answers = idx(source / "t10k-images-idx3-ubyte", source / "t10k-labels-idx1-ubyte")
    steps = iterations or math.ceil(epochs * limit / batch)

    def schedule(step: int) -> float:
        """Down to a tenth: what is stale at the end does little harm."""
        return 1 - 0.9 * step / steps

    return Job(
        name="convergence",
        model=network,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        schedule=schedule,
        data=(images[:limit], classes[:limit]),
        validation=(tests[:TESTED], answers[:TESTED]),
        metrics={"accuracy": accuracy},
        global_batch=batch,
        steps=steps,
        evaluate_every=max(1, steps // POINTS),
        seed=seed,
    )
