"""A job that is slow on one worker: the first that makes a file in the folder it runs in."""

import os
import time

import torch
from torch import nn
from torch.nn import functional as F

from distbelief import Job

torch.manual_seed(1)
X = torch.randn(64, 6)
Y = (X.sum(1) > 0).long()


def is_first() -> bool:
    try:
        os.close(os.open("slow", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x):
        time.sleep(0.04 if SLOW else 0.01)
        return self.layer(x)


def job(steps: int = 20) -> Job:
    return Job(
        model=Net,
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=(X, Y),
        global_batch=32,
        shards=8,
        steps=steps,
    )


SLOW = is_first()
