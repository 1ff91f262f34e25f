"""Fashion-MNIST and a dense network, whose gradient is large for the work it takes: what a slow link is measured with.

While there is a file `brake` in the folder in which the run was started, a step takes long: until all hosts are there.
"""

import os
import time
from pathlib import Path

import torch
from torch import nn

from distbelief import Job, accuracy, idx

BRAKE_S = 2.0
TESTED = 2000


def network() -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers)


def job(folder: str, steps: int = 300, batch: int = 128, lr: float = 0.05, every: int = 20) -> Job:
    source = Path(folder)
    images, classes = idx(source / "train-images-idx3-ubyte", source / "train-labels-idx1-ubyte")
    tests, answers = idx(source / "t10k-images-idx3-ubyte", source / "t10k-labels-idx1-ubyte")

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if os.path.exists("brake"):
            time.sleep(BRAKE_S)
        return nn.functional.cross_entropy(output, target)

    return Job(
        name="fashion-dense",
        model=network,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        data=(images, classes),
        validation=(tests[:TESTED], answers[:TESTED]),
        metrics={"accuracy": accuracy},
        global_batch=batch,
        steps=steps,
        evaluate_every=every,
    )
