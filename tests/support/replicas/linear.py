"""What models do with linear layers, ordinary and not: for tests of layers that are to behave as torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDE = 256
Loss = Callable[[Any, torch.Tensor], Any]


class Two(nn.Module):
    """Two large layers, and a small one."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(WIDE, WIDE, bias=bias)
        self.second = nn.Linear(WIDE, 2 * WIDE, bias=bias)
        self.small = nn.Linear(2 * WIDE, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.small(F.gelu(self.second(F.relu(self.first(x)))))
        return out


def ordinary(model: Any, x: torch.Tensor) -> Any:
    return model(x).square().mean()


def summed(model: Any, x: torch.Tensor) -> Any:
    return model.second(model.first(x)).sum()


def transposed(model: Any, x: torch.Tensor) -> Any:
    wide = torch.cat([x.reshape(-1, WIDE)] * WIDE)[:WIDE]
    return model(wide.t()).square().mean()


def used_elsewhere(model: Any, x: torch.Tensor) -> Any:
    return (model(x).sum() + (x @ model.first.weight).square().sum()) * 0.1


def recomputed(model: Any, x: torch.Tensor) -> Any:
    return checkpoint(model, x, use_reentrant=False).square().mean()


def with_a_penalty(model: Any, x: torch.Tensor) -> Any:
    loss = ordinary(model, x)
    (slope,) = torch.autograd.grad(loss, [model.first.weight], create_graph=True)
    return loss + slope.square().sum()


def in_half_precision(model: Any, x: torch.Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x).float().square().mean()


def mapped(model: Any, x: torch.Tensor) -> Any:
    return torch.func.vmap(model)(x).square().mean()
