"""Models and optimizers that cannot be divided in the way that is asked for, each for a reason of its own."""

import torch
from torch import nn
from torch.nn import functional as F

from distbelief import Job


class Deciding(nn.Module):
    """It looks at values to decide what to do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.sum() > 0:
            x = -x
        return self.second(x)


MODELS = {
    "deciding": Deciding,
    "short": lambda: nn.Sequential(nn.Linear(4, 1)),
    "whole": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)),
}


def job(model: str = "whole") -> Job:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return Job(
        model=MODELS[model],
        loss=F.mse_loss,
        optimizer=lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),  # looks at rows and columns
        data=(x, x.sum(1, keepdim=True)),
        global_batch=8,
        shards=4,
        steps=2,
    )
