"""A job in which one worker computes gradients with a flipped bit: the first one that gets far enough. Its process
number is then in the file `claimed`."""

import os

import torch
from torch import nn
from torch.nn import functional as F

from distbelief import Job

torch.manual_seed(1)
X = torch.randn(96, 6)
Y = (X.sum(1) > 0).long()
AFTER = 40
"""Gradients of a process; more than any check before training computes."""


class Flipping(nn.Module):
    def __init__(self, flips: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.flips = flips
        self.count = 0
        self.is_victim = False
        if flips != "none":
            self.layers[0].weight.register_hook(self.seen)

    def seen(self, gradient):
        self.count += 1
        if self.count == AFTER:
            self.is_victim = claim()
        if not self.is_victim or (self.flips == "once" and self.count > AFTER):
            return gradient
        gradient = gradient.clone()
        gradient.view(torch.int32)[3, 2] ^= 1 << 20
        return gradient

    def forward(self, x):
        return self.layers(x)


def claim() -> bool:
    """Whether this process is the first one."""
    try:
        file = os.open("claimed", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    os.write(file, str(os.getpid()).encode())
    os.close(file)
    return True


def job(flips: str = "none", steps: int = 200) -> Job:
    """`flips`: none, once or always."""
    return Job(
        model=lambda: Flipping(flips),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        data=(X, Y),
        global_batch=16,
        shards=4,
        steps=steps,
    )
