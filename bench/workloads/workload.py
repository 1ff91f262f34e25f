"""What is trained: a model, its data, its loss and its optimizer, for every system alike.

No system's names are known here, and nothing but torch is needed: a driver imports this in a peer's environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

SEED = 7

Data = tuple[torch.Tensor, torch.Tensor]
"""Samples and targets."""


@dataclass(frozen=True)
class Update:
    """The optimizer as data, so that systems that are not torch can have the same one."""

    kind: str
    """sgd or adamw"""
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def optimizer(self, parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        """torch's fused one, which was never slower than its default in any of the workloads."""
        options = {"fused": True, **options}
        if self.kind == "sgd":
            return torch.optim.SGD(parameters, self.lr, self.momentum, weight_decay=self.weight_decay, **options)
        return torch.optim.AdamW(parameters, self.lr, weight_decay=self.weight_decay, **options)


@dataclass(frozen=True)
class Workload:
    title: str
    batch_per_worker: int
    model: Callable[[], nn.Module]
    data: Callable[[], Data]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """The mean over the samples given."""
    update: Update
    test: Callable[[], Data] | None = None
    """Samples that are not trained on, where accuracy is measured."""
    blocks: tuple[str, int] = ("", 0)
    """The name of the list of equal modules, and how many: where systems that divide models may cut or wrap."""
    same_end: float = 0.02
    """How far the losses of two systems may be apart after the last compared step, relatively. (A few operations of
    rounding at the start grow with every step; other data or other arithmetic would show at once.)"""
    batch_norm: bool = False
    """What is learnt depends on how a batch is divided: only systems that divide it by workers can be compared."""
    bound_by: str = "compute"
    """compute or communication: what most of a step's time is, with two workers."""

    def optimizer(self, parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        return self.update.optimizer(parameters, **options)

    def global_batch(self, workers: int = 2) -> int:
        return self.batch_per_worker * workers

    def cuts(self, stages: int) -> list[str]:
        """The modules with which the second and later of so many stages begin.

        >>> from bench.workloads import WORKLOADS
        >>> WORKLOADS["gpt"].cuts(2), WORKLOADS["mlp"].cuts(2)
        (['blocks.3'], [])
        """
        name, count = self.blocks
        return [f"{name}.{count * stage // stages}" for stage in range(1, stages)] if name else []
