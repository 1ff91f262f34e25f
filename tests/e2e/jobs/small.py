"""A job that is quick to run, with switches for tests."""

import os
import pathlib
import time

import torch
from torch import nn
from torch.nn import functional as F

from distbelief import Job

torch.manual_seed(1)
X = torch.randn(96, 6)
Y = (X.sum(1) > 0).long()


def job(
    steps: int = 12,
    nap_s: float = 0.0,
    brake_s: float = 0.0,
    shards: int = 4,
    batch: int = 16,
    precision: str = "fp32",
    width: int = 16,
    hold_step: int = -1,
) -> Job:
    """While there is a file `brake`: every shard takes `brake_s` longer, and no member gets beyond step `hold_step`."""

    def loss(output, target):
        time.sleep(nap_s)
        if brake_s and os.path.exists("brake"):  # slow for as long as the test needs time, then quick
            time.sleep(brake_s)
            if os.path.exists("slow") and pathlib.Path("slow").read_text() == str(os.getpid()):
                time.sleep(20 * brake_s)
        return F.cross_entropy(output, target)

    def hold(step):
        while step >= hold_step and os.path.exists("brake"):
            time.sleep(0.01)
        return 1.0

    return Job(
        model=lambda: nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2)),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        data=(X, Y),
        global_batch=batch,
        shards=shards,
        steps=steps,
        schedule=hold if hold_step >= 0 else None,
        precision=precision,
    )
