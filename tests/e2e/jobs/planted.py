"""One sample, in shard 2 of step `at`, makes something that is not a number; `--set where=` says where it does so."""

import os
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from distbelief import Job
from distbelief.data.rules.order import positions_to_samples

STEP, SHARD = 137, 2
BATCH, SHARDS, SAMPLES, SEED = 16, 4, 3200, 7
MARK = 1000.0


def marked_sample(step: int) -> int:
    """The second sample of that shard."""
    position = step * BATCH + SHARD * BATCH // SHARDS + 1
    return int(positions_to_samples(np.array([position]), SAMPLES, SEED, epoch=0, shuffle=True)[0])


class Fragile(nn.Module):
    def __init__(self, where: str):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.where = where

    def forward(self, h, mark):
        marked = (mark == MARK)[:, None]
        if self.where == "forward":
            return torch.where(marked, torch.log(h.abs() - 1e9), h)
        if self.where == "backward":  # the root of 0 is 0, and its slope is infinite
            return h + 1e-3 * torch.sqrt((MARK - mark) * self.scale)[:, None]
        if self.where == "exception" and bool(marked.any()):
            raise ValueError("a sample that nobody expected")
        return h


class Net(nn.Module):
    def __init__(self, where: str):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.fragile = Fragile(where)
        self.head = nn.Linear(16, 2)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))  # not finite, and meant so

    def forward(self, x):
        return self.head(self.fragile(torch.tanh(self.first(x.clamp(-3, 3))), x[:, 0]))


def job(where: str = "forward", at: int = STEP, steps: int = 160, brake_s: float = 0.0) -> Job:
    torch.manual_seed(1)
    x = torch.randn(SAMPLES, 6)
    y = (x.sum(1) > 0).long()
    x[marked_sample(at), 0] = torch.nan if where == "data" else MARK

    def loss(output, target):
        if brake_s and os.path.exists("brake"):  # slow for as long as the test needs time, then quick
            time.sleep(brake_s)
        return F.cross_entropy(output, target)

    return Job(
        model=lambda: Net(where),
        loss=loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        data=(x, y),
        global_batch=BATCH,
        shards=SHARDS,
        steps=steps,
        seed=SEED,
    )
