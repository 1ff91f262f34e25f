"""For bench.sparse: a table of 50 million rows, of which each batch wants 4,096, any of them. Forward passes write
down how long the rows took, and when the gradient of the batch before was there."""

import time
from pathlib import Path

import torch
from torch import nn

from distbelief import EmbeddingTable, Job

BAGS = 64  # samples of a batch; each looks up so many rows
ROWS, WIDTH = 50_000_000, 16


class Bags(nn.Module):
    def __init__(self, out: str) -> None:
        super().__init__()
        self.table = EmbeddingTable(ROWS, WIDTH)
        self.dense = nn.Linear(WIDTH, 1)
        self.out = out
        self.gradient_at = 0.0

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        rows = self.table(numbers)
        ended = time.perf_counter()
        if self.out and torch.is_grad_enabled():
            with Path(self.out).open("a") as file:
                file.write(f"{ended - began} {began - self.gradient_at}\n")
            rows.register_hook(self.note_gradient)
        return self.dense(rows.mean(1)).squeeze(1)

    def note_gradient(self, gradient: torch.Tensor) -> None:
        self.gradient_at = time.perf_counter()


def job(steps: int = 100, out: str = "") -> Job:
    samples = steps * BAGS
    made = torch.Generator().manual_seed(0)
    return Job(
        model=lambda: Bags(out),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
        data=(torch.randint(ROWS, (samples, BAGS), generator=made), torch.randn(samples, generator=made)),
        global_batch=BAGS,
        shards=1,
        steps=steps,
    )
