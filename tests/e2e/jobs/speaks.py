"""A job whose code has too much to say: in an exception, on its output, as the name of a metric."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

from distbelief import Job

torch.manual_seed(1)
X, Y = torch.randn(32, 4), torch.randint(2, (32,))


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def there(depth):
    return back(depth - 1) if depth else 1 / 0


def back(depth):
    return there(depth - 1) if depth else 1 / 0


def job(fault: str = "", at: int = 2, steps: int = 4) -> Job:
    """`fault` happens when the loss is computed for the `at`-th time in a process."""
    calls = []

    def loss(output, target):
        calls.append(1)
        if len(calls) == at:
            if fault == "long":
                raise ValueError("a" * 50_000_000 + " the end")
            if fault == "deep":
                sys.setrecursionlimit(200_000)
                there(100_000)
            if fault == "characters":
                raise ValueError("bad \udcff and \0 and é")
            if fault == "mute":
                raise Mute
            if fault == "line":
                print("b" * 100_000_000, flush=True)
        return F.cross_entropy(output, target)

    def many(output, target):
        return (float(len(target)), float(len(target)))

    names = {"name": "m" * 50_000_000, "name-characters": "bad \udcff"}
    return Job(
        model=lambda: nn.Linear(4, 2),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=(X, Y),
        global_batch=16,
        shards=2,
        steps=steps,
        validation=(X, Y),
        metrics={names.get(fault, "right"): Classes() if fault == "values" else many},
    )


class Classes:
    """Has what a metric of torchmetrics has, and gives 100,000 values."""

    def __init__(self):
        self._defaults = {"total": torch.zeros(())}
        self._reductions = {"total": torch.sum}
        self.reset()

    def update(self, output, target):
        self.total = self.total + len(target)

    def compute(self):
        return self.total.repeat(100_000)

    def reset(self):
        self.total = torch.zeros(())

    def to(self, device):
        return self
