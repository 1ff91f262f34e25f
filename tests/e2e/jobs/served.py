"""Jobs for parameter servers: tiny, unsound, or one that servers cannot load."""

import traceback

import torch
from torch import nn
from torch.nn import functional as F

from distbelief import Job

X = torch.sin(torch.arange(96.0)).reshape(48, 2)


def job(fault: str = "none", steps: int = 6, samples: int = 48) -> Job:
    if fault == "server" and any(frame.name == "load_for_server" for frame in traceback.extract_stack()):
        raise RuntimeError("no server can load this")

    def loss(output, target):
        value = F.mse_loss(output, target)
        return value * float("nan") if fault == "nan" and bool((target == X[40:41, :1]).any()) else value

    return Job(
        model=lambda: nn.Linear(2, 1, bias=False),  # two numbers
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=(X[:samples], X[:samples, :1]),
        global_batch=8,
        shards=4,
        steps=steps,
        shuffle=False,
    )
