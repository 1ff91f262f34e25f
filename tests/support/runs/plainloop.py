"""Parts of a plain PyTorch loop, written without code of ours: samples, seeds, and sums along the tree."""

from __future__ import annotations

import random

import numpy as np
import torch

from distbelief.data.rules.order import positions_to_samples
from distbelief.shards import Schedule
from tests.e2e.jobs import plain

SCHEDULE = Schedule(len(plain.X), plain.BATCH, plain.SHARDS)


def samples_of(step: int, shard: int) -> torch.Tensor:
    epoch, first, end = SCHEDULE.shard(step, shard)
    positions = np.arange(first, end)
    return torch.from_numpy(positions_to_samples(positions, len(plain.X), plain.SEED, epoch, True))


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    random.seed(seed)


def tree_sum(parts: list) -> list:
    """The sum of the parts: cut at the largest power of two below their number."""
    if len(parts) == 1:
        return parts[0]
    middle = 1
    while middle * 2 < len(parts):
        middle *= 2
    left, right = tree_sum(parts[:middle]), tree_sum(parts[middle:])
    return [a + b for a, b in zip(left, right, strict=True)]


def clip_weights(model: torch.nn.Module) -> None:
    """What the job's `after_update` does, as a WGAN does it to its critic."""
    for layer in (model.hidden, model.head):
        layer.weight.data.clamp_(-plain.LIMIT, plain.LIMIT)
