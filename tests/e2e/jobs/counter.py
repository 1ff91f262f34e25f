"""A job whose weights count the updates that were applied to them: every gradient is 1, and SGD subtracts it."""

import itertools
import os
import time

import torch
from torch import nn

from distbelief import Job


class Count(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.count = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return self.count.sum() + 0 * x.sum()


def job(steps: int = 60, width: int = 1000, nap_s: float = 0.0, brake_s: float = 0.0, hold_after: int = -1) -> Job:
    """While there is a file `brake`: a shard takes `brake_s` longer, and no process computes more than `hold_after`."""
    computed = itertools.count()

    def loss(output, target):
        time.sleep(nap_s)
        if brake_s and os.path.exists("brake"):  # slow for as long as the test needs time, then quick
            time.sleep(brake_s)
        if hold_after >= 0 and next(computed) >= hold_after:
            while os.path.exists("brake"):
                time.sleep(0.01)
        return output

    return Job(
        model=lambda: Count(width),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        data=(torch.zeros(64, 1), torch.zeros(64)),
        global_batch=8,
        shards=4,
        steps=steps,
    )
