"""A model of 100 million parameters with AdamW whose steps are short: wide layers and a tiny batch.

    PYTHONPATH=. distbelief train bench/checkpoint/job.py --set steps=40 --save-every 20

Every parameter gets a gradient in every step, so the optimizer's state is whole after the first: 1.2 GB to save. The
peers' loop (checkpoint/peer.py) takes model, data, loss and optimizer from here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from distbelief import Job

SEED = 7
WIDTH, LAYERS = 4096, 6
BATCH = 8
SAMPLES = 256

loss = F.mse_loss


def model(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())))


def data(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(SAMPLES, width, generator=torch.Generator().manual_seed(SEED)) - 0.5
    return x, x.flip(1)


def optimizer(parameters: Sequence[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, **options)


def job(steps: int = 100, width: int = WIDTH, layers: int = LAYERS, shards: int = 1) -> Job:
    return Job(
        name="wide",
        model=lambda: model(width, layers),
        loss=loss,
        optimizer=optimizer,
        data=data(width),
        global_batch=BATCH,
        steps=steps,
        shards=shards,
        seed=SEED,
    )
