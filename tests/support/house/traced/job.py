"""A small job, two shards a step; with `traced_step` the worker notes what one step passes through."""

import sitecustomize
import torch
from torch import nn

from distbelief import Job

CALLS = [0]


def job(steps: int = 40, shards: int = 2, traced_step: bool = False) -> Job:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        CALLS[0] += 1
        if traced_step and CALLS[0] == 20:
            sitecustomize.step_begins()
        elif traced_step and CALLS[0] == 21:
            sitecustomize.step_ends()
        return nn.functional.mse_loss(output, target)

    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    return Job(
        model=lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        data=(x, x.sum(1, keepdim=True)),
        clip_norm=1.0,
        global_batch=16,
        shards=shards,
        steps=steps,
    )
