"""Jobs that fail, one per `--set fault=NAME`."""

import os

import psutil
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from distbelief import Job


class FailsOnOneWorker(nn.Module):
    """Raises only where a sample of the last shard is seen, so on one worker alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        if bool((x[:, 0] == 31.0).any()):
            raise ValueError("boom in the model")
        return self.layer(x)


class KillsItsWorker(FailsOnOneWorker):
    """As a crash in native code would: whoever computes the last shard dies."""

    def forward(self, x):
        if self.training and bool((x[:, 0] == 31.0).any()) and len(x) == 8:
            os.kill(os.getpid(), 11)
        return self.layer(x)


class TooLarge(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        # Nearly half of the machine's memory, never touched; three copies of it do not fit.
        self.huge = nn.Parameter(torch.empty(int(0.45 * psutil.virtual_memory().total / 4)))

    def forward(self, x):
        return self.layer(x)


class FaultyFiles(Dataset):
    def __init__(self, deadly):
        self.deadly = deadly

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 17 and self.deadly:
            os.kill(os.getpid(), 9)
        if index == 17:
            raise KeyError("no such image")
        return torch.zeros(4), index % 2


def job(fault: str, batch: int = 16) -> Job:
    x = torch.arange(32.0)[:, None].expand(32, 4).contiguous()
    y = torch.arange(32) % 2
    fields = {
        "model": lambda: nn.Linear(4, 2),
        "loss": F.cross_entropy,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        "data": (x, y),
        "global_batch": batch,
        "shards": 4,
        "steps": 8,
        "shuffle": False,
    }
    changes = {
        "model": {"model": FailsOnOneWorker, "global_batch": 32},
        "deadly": {"model": KillsItsWorker, "global_batch": 32, "validation": (x[:4], y[:4])},
        "nan": {"loss": lambda output, target: F.cross_entropy(output, target) * float("nan")},
        "schedule": {"schedule": lambda step: 1 / (3 - step)},
        "empty": {"data": (x[:0], y[:0])},
        "few": {"data": (x[:3], y[:3])},
        "shards": {"shards": 40},
        "memory": {"model": TooLarge},
        "reader-dies": {"data": FaultyFiles(True)},
        "reader-raises": {"data": FaultyFiles(False)},
        "no-optimizer": {"optimizer": lambda parameters: "adam"},
        "metric": {"validation": (x, y), "metrics": {"mean": lambda output, target: output.mean()}},
        "loss-shape": {"loss": lambda output, target: output},
    }
    return Job(**{**fields, **changes[fault]})
