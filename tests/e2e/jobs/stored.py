"""A job whose checkpoints hold all that one can: a frozen layer, BatchNorm's buffers, tied weights, momentum.

`wide` makes the state large and the step hardly slower, so that a save takes long enough to be killed in.
"""

import contextlib
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from distbelief import Job, accuracy

torch.manual_seed(1)
X = torch.randn(96, 6)
Y = (X.sum(1) > 0).long()


class Net(nn.Module):
    def __init__(self, width, wide):
        super().__init__()
        self.enter = nn.Linear(6, width)
        self.enter.requires_grad_(False)
        self.norm = nn.BatchNorm1d(width)
        self.middle = nn.Linear(width, width, bias=False)
        self.again = nn.Linear(width, width, bias=False)
        self.again.weight = self.middle.weight
        self.padding = nn.Parameter(torch.randn(wide))
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        h = torch.tanh(self.middle(self.norm(self.enter(x))))
        h = F.dropout(self.again(h), 0.2, self.training)
        return self.head(h) + self.padding[:2]


def job(
    steps: int = 12,
    width: int = 8,
    wide: int = 64,
    lr: float = 0.1,
    seed: int = 0,
    evaluate_every: int = 6,
    brake_s: float = 0.0,
    holds: bool = False,
) -> Job:
    """With `holds`: while there is a file `hold`, no member gets beyond the step whose number it has."""

    def loss(output, target):
        if brake_s and os.path.exists("brake"):  # slow for as long as the test needs time, then quick
            time.sleep(brake_s)
        return F.cross_entropy(output, target)

    def hold(step):
        with contextlib.suppress(FileNotFoundError):  # it is removed when the test is ready
            while step >= int(Path("hold").read_text()):
                time.sleep(0.01)
        return 1.0

    return Job(
        model=lambda: Net(width, wide),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        data=(X, Y),
        validation=(X[:32], Y[:32]),
        metrics={"accuracy": accuracy},
        evaluate_every=evaluate_every,
        global_batch=16,
        shards=4,
        steps=steps,
        schedule=hold if holds else None,
        seed=seed,
    )
