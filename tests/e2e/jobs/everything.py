"""A job with everything that makes exactness hard, at once.

A Dataset with random augmentation (read in reader processes), batches that are not divisible by the shards, a partial
last batch, BatchNorm, dropout, a frozen layer, tied weights, a sparse embedding, a parameter that only some shards
use, one that no shard ever uses, a loss with weights, two parameter groups, clipping, a schedule, and functions that
limit weights after every update.
"""

import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from distbelief import Job, accuracy


class Augmented(Dataset):
    def __len__(self):
        return 107

    def __getitem__(self, index):
        base = torch.sin(torch.arange(12.0) * (index + 1))
        noise = torch.randn(12) * 0.1 + float(np.random.rand()) * 0.01 + random.random() * 0.01
        target = index % 4 if index % 5 else -100  # every fifth sample is to be ignored
        return base + noise, torch.tensor(index % 10), target


class Net(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embedding = nn.Embedding(10, width, sparse=True)
        self.enter = nn.Linear(12, width)
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(width)
        self.middle = nn.Linear(width, width, bias=False)
        self.again = nn.Linear(width, width, bias=False)
        self.again.weight = self.middle.weight
        self.sometimes = nn.Parameter(torch.ones(width))
        self.never = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(width, 4)

    def forward(self, x, kind):
        h = F.relu(self.enter(x)) + self.embedding(kind)
        h = self.norm(self.frozen(h))
        h = F.dropout(self.again(torch.tanh(self.middle(h))), 0.2, self.training)
        if int(kind[0]) % 3 == 0:
            h = h * self.sometimes
        return self.head(h)


def weighted(output, target):
    known = (target != -100).sum()
    return F.cross_entropy(output, target, ignore_index=-100, reduction="sum"), known


def optimizer(parameters):
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3}], lr=1e-2)


def short_rows(p):
    return torch.renorm(p, 2, 0, 0.5)


def job(epochs: int = 3, brake_s: float = 0.0, hold_step: int = -1) -> Job:
    """While there is a file `brake`: every shard takes `brake_s` longer, and no member gets beyond step `hold_step`."""

    def rate(step):
        while 0 <= hold_step <= step and Path("brake").exists():
            time.sleep(0.01)
        return min(1.0, (step + 1) / 4)

    def braking(output, target):
        if brake_s and Path("brake").exists():  # slow for as long as the test needs time, then quick
            time.sleep(brake_s)
        return weighted(output, target)

    return Job(
        model=Net,
        loss=braking,
        optimizer=optimizer,
        data=Augmented(),
        collate=None,
        global_batch=25,
        shards=7,
        epochs=epochs,
        seed=5,
        schedule=rate,
        clip_norm=0.5,
        after_update={"again.weight": short_rows, "enter.*": lambda p: p.clamp_(-0.2, 0.2), "never": torch.zero_},
        validation=Augmented(),
        metrics={"accuracy": accuracy},
        evaluate_every=6,
    )
