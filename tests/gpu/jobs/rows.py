"""A small model with a table: under parameter servers its rows lie there, and come to the device when wanted."""

import torch
from torch import nn
from torch.nn import functional as F

from distbelief import EmbeddingTable, Job

ROWS, SAMPLES = 300, 96


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = EmbeddingTable(ROWS, 16, init=("normal", 0.1))
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(self.items(numbers).sum(1))
        return out


def data() -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.randint(0, ROWS, (SAMPLES, 5), generator=torch.Generator().manual_seed(1))
    return numbers, (numbers.sum(1) > 5 * ROWS / 2).long()


def job(steps: int = 40) -> Job:
    return Job(
        name="rows",
        model=Scores,
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.02),
        data=data(),
        global_batch=32,
        shards=4,
        steps=steps,
        seed=3,
    )
