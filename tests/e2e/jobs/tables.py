"""A job with tables much larger than memory; or one whose rows count the gradients that were applied to them."""

import os
import time

import torch
from torch import nn

from distbelief import EmbeddingTable, Job

ROWS = 4_000_000_000  # of 8 numbers: 128 GB
SAMPLES = 64
USERS = torch.arange(SAMPLES).pow(2) % 23 * 170_000_001  # several samples have one user
X = torch.sin(torch.arange(SAMPLES * 3.0)).reshape(SAMPLES, 3)


class Taste(nn.Module):
    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.users = EmbeddingTable(ROWS, 8, init="zeros" if counts else ("normal", 0.3))
        own = lambda parameters: torch.optim.SGD(parameters, lr=0.05)  # noqa: E731
        self.kinds = EmbeddingTable(5, 8, init=("uniform", 0.1), optimizer=own)
        self.dense = nn.Linear(3, 8)
        self.counts = counts

    def forward(self, users, x):
        rows = self.users(users)
        if self.counts:
            return rows.sum(1) + 0 * self.dense(x).sum(1)
        if torch.is_grad_enabled():
            rows = nn.functional.dropout(rows, 0.2)
        return (rows * (self.dense(x) + self.kinds(users % 5) + self.kinds(users % 3))).sum(1)


def job(steps: int = 60, brake_s: float = 0.0, counts: bool = False) -> Job:
    def loss(output, target):
        if brake_s and os.path.exists("brake"):  # slow for as long as the test needs time, then quick
            time.sleep(brake_s)
        return (output.sum(), 1.0) if counts else nn.functional.mse_loss(output, target)

    return Job(
        model=lambda: Taste(counts),
        loss=loss,
        optimizer=lambda parameters: (
            torch.optim.SGD(parameters, lr=1.0) if counts else torch.optim.AdamW(parameters, lr=0.02)
        ),
        schedule=None if counts else lambda step: 1 / (1 + 0.01 * step),
        clip_norm=None if counts else 0.5,
        data=(USERS, X, X.sum(1)),
        validation=None if counts else (USERS, X, X.sum(1)),
        evaluate_every=30,
        global_batch=16,
        shards=4,
        steps=steps,
    )
