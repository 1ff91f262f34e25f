"""Cuts all samples into portions, and decides which worker computes which portions of an evaluation.

A portion has the same samples and the same seeds in every step. So the loss is one function of the parameters, even if
the model uses dropout or the data is augmented at random. Portions depend on the job alone.

Portions are the leaves of a fixed binary tree (`shards.split`), and `Portioning` gives a worker a node of that tree.
Every sum that comes back is therefore a sum of the tree: which worker computed it changes no bit. Nodes are large at
the beginning of an evaluation and small at its end, so that all workers finish at about the same time. A faster worker
takes more nodes, and a late node gets a backup copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from distbelief.job import Job
from distbelief.shards import Range, Schedule, shard_seed

USUAL_PORTIONS = 64
"""Usually many more than workers, so that faster workers can take more of them."""
MOST_TOGETHER = 16
"""The most portions that a worker adds up before it sends their sum: it holds a partial sum per level of their tree."""


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
    """The default size of a portion: a 64th of all samples, and at most the `global_batch` of the job.

    >>> import torch
    >>> job = Job(model=torch.nn.Linear(1, 1), loss=max, optimizer=max, data=[1], global_batch=100, steps=1)
    >>> usual_portion(job, 1000), usual_portion(job, 60_000)
    (16, 100)
    """
    return max(1, min(-(-samples // USUAL_PORTIONS), job.global_batch))


def portion_seed(job: Job, portion: int) -> int:
    return shard_seed(job.seed, 0, portion)


def levels(portions: int) -> int:
    """The number of partial sums that a worker holds at once.

    >>> levels(1), levels(3), levels(1000)
    (1, 2, 5)
    """
    return min(portions, MOST_TOGETHER).bit_length()


SHARE = 4
"""A node has at most (remaining portions) / (`SHARE` · n) portions, for n members."""
LATE = 2.0
"""Portions that take `LATE` times as long as usual, and `LATE_S` more, get a backup copy."""
LATE_S = 0.02


class Holder(Struct, frozen=True):
    """A worker that computes a node."""

    worker: int
    node: Range
    since: float


class Portioning(Struct):
    """The ledger of one evaluation at a time. It is part of a slice's state, so it is deterministic: `now` is an
    argument.

    >>> work = Portioning(portions=16)
    >>> work.begin(7, members=2)
    >>> work.take(worker=0, now=0.0), work.take(worker=1, now=0.0)
    ((0, 2), (2, 3))
    >>> work.computed(0, 7, (0, 2), [(1.0, 2.0), (3.0, 2.0)], now=1.0)
    >>> work.take(worker=0, now=1.0), work.total()
    ((3, 4), None)
    """

    portions: int
    evaluation: int = -1
    open: bool = False
    """Whether the present driver shows the point of the evaluation."""
    members: int = 1
    losses: dict[int, tuple[float, float]] = {}
    """Portion -> (loss as a sum, weight), for every portion whose gradient is on all slices."""
    holders: list[Holder] = []
    pace_s: float = 0.0
    """Running average of the time that a portion takes."""

    def begin(self, evaluation: int, members: int) -> None:
        """Begin an evaluation, or begin it again: then the portions that are computed stay."""
        if evaluation != self.evaluation:
            self.losses = {}
        self.evaluation = evaluation
        self.gather(members)
        self.open = True

    def gather(self, members: int) -> None:
        """A new generation: it gets no portions before its driver has begun an evaluation. Computed portions stay, in
        case it begins the same evaluation."""
        self.members = members
        self.holders = []
        self.open = False

    def take(self, worker: int, now: float) -> Range | None:
        """A node for an idle worker. None: no portion is free."""
        self.holders = [one for one in self.holders if one.worker != worker]
        if not self.open:
            return None
        copies: dict[int, list[Holder]] = {p: [] for p in range(self.portions) if p not in self.losses}
        for one in self.holders:
            for portion in range(*one.node):
                if portion in copies:
                    copies[portion].append(one)
        free = [portion for portion, holders in copies.items() if not holders]
        if not free:  # backup copies: the first one counts, and the other has the same bits
            free = [p for p, holders in copies.items() if len(holders) == 1 and self._is_late(holders[0], now)]
        if not free:
            return None
        node = self._node(free)
        self.holders.append(Holder(worker, node, now))
        return node

    def _is_late(self, holder: Holder, now: float) -> bool:
        usual_s = self.pace_s * (holder.node[1] - holder.node[0])
        return self.pace_s > 0 and now - holder.since > LATE * usual_s + LATE_S

    def _node(self, free: Sequence[int]) -> Range:
        """The largest node that begins with the first of these portions, is free, and is no more than a fair share."""
        first, there = free[0], set(free)
        size, most = 1, min(MOST_TOGETHER, max(1, len(free) // (SHARE * self.members)))
        while 2 * size <= most and first % (2 * size) == 0 and there.issuperset(range(first, first + 2 * size)):
            size *= 2
        return first, first + size

    def computed(
        self, worker: int, evaluation: int, node: Range, losses: Sequence[tuple[float, float]], now: float
    ) -> None:
        """Record that every slice has the sum of these portions."""
        if evaluation != self.evaluation:
            return
        for one in self.holders:
            if one.worker == worker and one.node == node:
                took_s = max(now - one.since, 0.0) / (node[1] - node[0])
                self.pace_s = 0.7 * self.pace_s + 0.3 * took_s if self.pace_s else took_s
        self.holders = [one for one in self.holders if one.worker != worker]
        for portion, loss in zip(range(*node), losses, strict=True):
            self.losses.setdefault(portion, loss)

    def total(self) -> tuple[float, float] | None:
        """(sum of the loss, weight) over all portions; None: some are missing."""
        if not self.open or len(self.losses) < self.portions:
            return None
        losses, weights = zip(*self.losses.values(), strict=True)
        if not all(math.isfinite(one) for one in (*losses, *weights)):
            return math.nan, math.fsum(one for one in weights if math.isfinite(one))
        return math.fsum(losses), math.fsum(weights)
