"""A model that cannot be cut into stages: it looks at values to decide what to do."""

import torch
from torch import nn
from torch.nn import functional as F

from distbelief import Job


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.sum() > 0:
            x = -x
        return self.second(x)


def job() -> Job:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return Job(
        model=Deciding,
        loss=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        data=(x, x.sum(1, keepdim=True)),
        global_batch=8,
        shards=4,
        steps=2,
    )
