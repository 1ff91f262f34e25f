"""The soak's job: it trains until it is stopped, and its state has all that could come out differently.

Random augmentations in reader processes, BatchNorm, dropout, AdamW, clipping, a schedule, and an evaluation of other
samples. `nap_s` makes a shard slow without processor time; it changes no bit, and the twin has none.
"""

import math
import random
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from distbelief import Job, accuracy

SIZE = 8


class Pictures(Dataset):
    """Waves with a direction, which is the class; each time with other noise, and at another place."""

    def __init__(self, count, begin=0, changes=True):
        self.count = count
        self.begin = begin
        self.changes = changes

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        number = self.begin + index
        angle = (number % 4) * math.pi / 4
        y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        phase = random.random() * 6 if self.changes else number * 0.7
        picture = torch.sin(x * math.cos(angle) + y * math.sin(angle) + phase)
        if self.changes:
            picture = picture + 0.3 * torch.randn(SIZE, SIZE) + 0.1 * float(np.random.rand())
        return picture.float()[None], number % 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.middle = nn.Linear(8 * SIZE * SIZE // 4, 64)
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        h = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2).flatten(1)
        return self.head(F.dropout(F.relu(self.middle(h)), 0.2, self.training))


def job(steps: int = 1_000_000_000, nap_s: float = 0.0, evaluate_every: int = 100) -> Job:
    def loss(output, target):
        time.sleep(nap_s)
        return F.cross_entropy(output, target)

    return Job(
        model=Net,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01),
        data=Pictures(1001),
        validation=Pictures(64, begin=5000, changes=False),
        metrics={"accuracy": accuracy},
        evaluate_every=evaluate_every,
        global_batch=32,
        shards=8,
        steps=steps,
        schedule=lambda step: 0.6 + 0.4 * math.cos(step / 500),
        clip_norm=1.0,
        seed=11,
    )
