"""The verdict on a step, from the numbers of its shards: its loss and fingerprint, or the error for which it is not
applied. Pure: members that see the same numbers come to the same verdict.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

from distbelief.errors import JobError
from distbelief.strategies.base import NonFiniteLoss, StepResult
from distbelief.transport.exchange import ROW

LOSS, WEIGHT, INTEGERS, COUNTS = range(ROW)
"""The numbers that a shard tells of itself: see `ShardResult`, and how many samples it had."""


def judge_rows(step: int, rows: np.ndarray) -> StepResult:
    """What a step gave, from the rows of all its shards."""
    found = judge(step, rows[:, LOSS], rows[:, WEIGHT], rows[:, COUNTS], rows.tobytes())
    if len(set(rows[rows[:, COUNTS] > 0, INTEGERS])) > 1:
        raise JobError(
            "an integer buffer of the model has other values after one shard than after another: it depends on the "
            "samples, so there is no single value to go on with"
        )
    return found


def judge(step: int, losses: np.ndarray, weights: np.ndarray, samples: np.ndarray, told: bytes) -> StepResult:
    """One number of each kind per shard. `told`: all that the shards have told, of which the fingerprint is made.

    >>> judge(3, np.array([1.0, 2.0]), np.array([2.0, 4.0]), np.array([2, 4]), b"").loss
    0.5
    """
    bad = np.flatnonzero(~np.isfinite(losses) | ~np.isfinite(weights))
    if len(bad):
        raise NonFiniteLoss(float(losses[bad[0]]), step, int(bad[0]))
    weight = math.fsum(weights)
    loss = math.fsum(losses) / weight if weight else 0.0
    return StepResult(loss, int(samples.sum()), hashlib.blake2b(told, digest_size=8).hexdigest())
