"""Wide & Deep (Cheng et al., 2016): tables of embeddings under a small network, beside one weight for every category.

Most parameters are in the tables, and most of a table gets no gradient in a step.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from bench.workloads.workload import SEED, Data

FIELDS, ROWS, WIDTH = 8, 20_000, 16


class WideDeep(nn.Module):
    """A sample is one category in each field; rows of field f are f * ROWS and after."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.table = nn.Embedding(FIELDS * ROWS, 1), nn.Embedding(FIELDS * ROWS, WIDTH)
        self.deep = nn.Sequential(
            nn.Linear(FIELDS * WIDTH, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
        )
        nn.init.zeros_(self.wide.weight)
        nn.init.normal_(self.table.weight, std=0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.wide(x).sum(1) + self.deep(self.table(x).flatten(1))).squeeze(1)  # type: ignore[no-any-return]


def clicks() -> Data:
    """Categories with a long tail; clicks by the sum of each category's own taste."""
    generator = torch.Generator().manual_seed(SEED)
    count = 65_536
    drawn = (ROWS ** torch.rand(count, FIELDS, generator=generator)).long().clamp(max=ROWS) - 1
    x = drawn + ROWS * torch.arange(FIELDS)
    taste = torch.randn(FIELDS * ROWS, generator=generator)
    chance = torch.sigmoid(taste[x].sum(1))
    return x, (torch.rand(count, generator=generator) < chance).long()


def click_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(output, target.float())
