"""A starter job: tell the three arms of a spiral apart.

Train it on two worker processes, then on any other number; the weights are the same, bit for bit:

    distbelief train my_job.py --workers 2
    distbelief train my_job.py --workers 3

Change a hyper-parameter (the parameters of `job` below) without editing the file:

    distbelief train my_job.py --set lr=0.01 --set width=128
"""

import math

import torch
from distbelief import Job, accuracy
from torch import nn


def spirals(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in the plane and the arm that each one belongs to. Put your own data here.

    Tensors, arrays and any torch Dataset will do. The data must be the same in every process, so random data needs
    a fixed seed of its own.
    """
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(0, 3, (samples,), generator=generator)
    radius = torch.rand(samples, generator=generator)
    angle = 2 * math.pi * (arm / 3 + radius) + 0.15 * torch.randn(samples, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm


def job(lr: float = 0.003, width: int = 64, epochs: int = 12, seed: int = 0) -> Job:
    """What to learn. Nothing here says how many workers there are: that is up to the command line."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(2, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 3),
        )

    return Job(
        model=model,
        loss=nn.functional.cross_entropy,  # (output, target) -> the mean over the samples
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        data=spirals(6000, seed=1),
        global_batch=120,  # samples per step, over all workers together
        epochs=epochs,  # or steps=...
        validation=spirals(1500, seed=2),
        metrics={"accuracy": accuracy},  # name -> function (output, target) -> (sum, weight)
        evaluate_every=200,  # steps; there is always one evaluation at the end
        seed=seed,  # of the weights, the order of the samples, and all else that is random
    )
