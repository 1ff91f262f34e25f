"""How all samples are cut into small portions, for strategies that look at all of them in every step.

A portion has the same samples and the same seeds in every step: the loss is one function of the parameters, also where
the model drops units or the data is augmented at random. Portions depend on the job alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from distbelief.job import Job
from distbelief.shards import Schedule, shard_seed

USUAL_PORTIONS = 64
"""Many more than there are workers, as a rule: so that faster ones can take more."""
MOST_TOGETHER = 16
"""Portions that a worker adds up before it sends their sum: it holds a partial sum per level of their tree."""


@dataclass(frozen=True)
class WholeData(Schedule):
    """Every step has all samples, in the order of the first epoch.

    >>> s = whole_data(10, portion=4)
    >>> s.shards, s.batch(3), s.shard(3, 2), s.occupied(3), s.steps_per_epoch
    (3, (0, 0, 10), (0, 8, 10), 3, 1)
    """

    @property
    def steps_per_epoch(self) -> int:
        return 1

    def batch(self, step: int) -> tuple[int, int, int]:
        return 0, 0, self.samples


def whole_data(samples: int, portion: int) -> WholeData:
    count = -(-samples // portion)
    return WholeData(samples, count * portion, count)


def usual_portion(job: Job, samples: int) -> int:
    """A small part of all, and never more samples at once than the job takes in a step.

    >>> import torch
    >>> job = Job(model=torch.nn.Linear(1, 1), loss=max, optimizer=max, data=[1], global_batch=100, steps=1)
    >>> usual_portion(job, 1000), usual_portion(job, 60_000)
    (16, 100)
    """
    return max(1, min(-(-samples // USUAL_PORTIONS), job.global_batch))


def portion_seed(job: Job, portion: int) -> int:
    return shard_seed(job.seed, 0, portion)


def levels(portions: int) -> int:
    """Partial sums that a worker holds at once.

    >>> levels(1), levels(3), levels(1000)
    (1, 2, 5)
    """
    return min(portions, MOST_TOGETHER).bit_length()
