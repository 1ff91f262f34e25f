"""A job whose teacher is a frozen parameter that forward moves, and whose samples have a generator of their own.

With pure=true the teacher is a buffer, and the samples draw from numpy's global generator."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from distbelief import Job


class Noise(Dataset):
    def __init__(self, own):
        self.rng = np.random.default_rng(0) if own else np.random  # the global generator is seeded for each sample

    def __len__(self):
        return 96

    def __getitem__(self, index):
        x = torch.sin(torch.arange(6.0) * (index + 1))
        return x + 0.1 * float(self.rng.normal()), int(x.sum() > 0)


class Student(nn.Module):
    def __init__(self, pure):
        super().__init__()
        self.learner = nn.Linear(6, 2)
        self.teacher = nn.Linear(6, 2).requires_grad_(False)
        if pure:
            for name, value in list(self.teacher.named_parameters()):
                delattr(self.teacher, name)
                self.teacher.register_buffer(name, value.detach())

    def forward(self, x):
        with torch.no_grad():
            for theirs, mine in zip((self.teacher.weight, self.teacher.bias), self.learner.parameters(), strict=True):
                theirs.data.lerp_(mine, 0.05)
            wanted = self.teacher(x)
        out = self.learner(x)
        return out + 0.1 * (wanted - out).pow(2).mean()


def job(pure: bool = False, steps: int = 12) -> Job:
    return Job(
        model=lambda: Student(pure),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=Noise(own=not pure),
        global_batch=16,
        steps=steps,
    )
