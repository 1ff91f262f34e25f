"""Which samples are in which step, as DistBelief takes them: the peers are given the same."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distbelief.data.rules.order import positions_to_samples
from distbelief.shards import Schedule


def batches(samples: int, workers: int, batch_per_worker: int, steps: int, seed: int) -> NDArray[np.int64]:
    """(steps, workers * batch_per_worker): one worker's part after the other's. Every step has a whole batch.

    >>> batches(samples=8, workers=2, batch_per_worker=2, steps=2, seed=0).shape
    (2, 4)
    """
    schedule = Schedule(samples, workers * batch_per_worker, workers)
    found = []
    for step in range(steps):
        parts = []
        for rank in range(workers):
            epoch, first, end = schedule.shard(step, rank)
            positions = np.arange(first, end, dtype=np.int64)
            parts.append(positions_to_samples(positions, samples, seed, epoch, shuffle=True))
        found.append(np.concatenate(parts))
    return np.stack(found)
