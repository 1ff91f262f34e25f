"""A job whose cost is a sleep, so that a slow worker frees no processor for the others.

    PYTHONPATH=. distbelief train bench/balance/job.py --workers 4 --set slow_file=FILE

Each sample takes `sample_ms`; in the process whose number stands in `slow_file`, `factor` times as long. The file may
appear, change or vanish while the job runs. The result of training is that of an ordinary small model.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from distbelief import Job

SHARDS = 16
BATCH = 64


class Sleeper(nn.Module):
    def __init__(self, sample_ms: float, factor: float, slow_file: str) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self._sample_s = sample_ms / 1000
        self._factor = factor
        self._slow_file = Path(slow_file) if slow_file else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(len(x) * self._sample_s * (self._factor if self._slowed() else 1.0))
        found: torch.Tensor = self.layer(x)
        return found

    def _slowed(self) -> bool:
        if self._slow_file is None:
            return False
        try:
            return self._slow_file.read_text() == str(os.getpid())
        except FileNotFoundError:
            return False


def job(steps: int = 100, sample_ms: float = 5.0, factor: float = 3.0, slow_file: str = "") -> Job:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1024, 8, generator=generator)
    return Job(
        name="sleeper",
        model=lambda: Sleeper(sample_ms, factor, slow_file),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=(x, (x[:, 0] > 0).long()),
        global_batch=BATCH,
        steps=steps,
        shards=SHARDS,
        seed=3,
    )
