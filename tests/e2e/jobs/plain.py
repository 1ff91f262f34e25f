"""A CNN-like model with BatchNorm and dropout, AdamW, clipping, a schedule and clipped weights: what the plain loop is
compared with.
"""

import torch
from torch import nn
from torch.nn import functional as F

from distbelief import Job

torch.manual_seed(3)
X = torch.randn(90, 1, 8, 8)
Y = torch.randint(0, 5, (90,))
BATCH, SHARDS, STEPS, SEED, CLIP, LIMIT = 20, 8, 14, 11, 0.3, 0.04


def rate(step: int) -> float:
    return 1.0 / (1 + 0.1 * step)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3)
        self.norm = nn.BatchNorm2d(12)
        self.hidden = nn.Linear(12 * 36, 50)
        self.head = nn.Linear(50, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x))).flatten(1)
        return self.head(F.dropout(F.relu(self.hidden(x)), 0.3, self.training))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 40)
        self.head = nn.Linear(40, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(x.flatten(1))))


def job(simple: bool = False) -> Job:
    return Job(
        model=Mlp if simple else Net,
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-3, weight_decay=0.05),
        data=(X, Y),
        global_batch=BATCH,
        shards=SHARDS,
        steps=STEPS,
        seed=SEED,
        schedule=rate,
        clip_norm=CLIP,
        after_update={} if simple else {"h*.weight": lambda p: p.clamp_(-LIMIT, LIMIT)},
    )
