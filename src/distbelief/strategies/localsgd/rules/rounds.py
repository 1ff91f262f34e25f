"""Rounds: a round is some local steps and the outer step after them. Pure.

The run counts in steps (global batches); a round is committed and taken over as a whole. A round ends at every multiple
of H steps, and at the end of the run. Replica r has the same contiguous group of each step's shards; any member may
compute it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distbelief.errors import JobError
from distbelief.shards import Range, Schedule


def group_of(shards: int, replicas: int, replica: int) -> Range:
    """The shards of a replica.

    >>> [group_of(8, 3, r) for r in range(3)]
    [(0, 2), (2, 5), (5, 8)]
    """
    return replica * shards // replicas, (replica + 1) * shards // replicas


@dataclass(frozen=True)
class RoundSettings:
    """The settings of strategy and job that a worker needs to run rounds."""

    steps: int
    """H: local steps of a round."""
    replicas: int
    """R: replicas of the model."""
    outer: Mapping[str, Any]
    """The outer step, as options of torch.optim.SGD."""
    compression: str
    """The compression of differences; empty: none."""
    sends_copies: bool
    """Whether, without shared memory, every inner state is also sent to a second worker."""


@dataclass(frozen=True)
class Rounds:
    """Which steps belong to a round, and which replicas have samples in it. `total`: the steps of the run.

    >>> rounds = Rounds(Schedule(samples=20, global_batch=8, shards=4), local=4, replicas=2, total=10)
    >>> rounds.count, [list(rounds.steps(t)) for t in range(3)], rounds.after(3)
    (3, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], 10)
    """

    schedule: Schedule
    local: int
    """H, the steps of a round."""
    replicas: int
    total: int

    @property
    def shards(self) -> int:
        """The units of work that members divide among themselves: the replicas."""
        return self.replicas

    @property
    def count(self) -> int:
        return -(-self.total // self.local)

    def steps(self, number: int) -> range:
        return range(number * self.local, min((number + 1) * self.local, self.total))

    def after(self, rounds: int) -> int:
        """The number of steps that are done after `rounds` rounds."""
        return min(rounds * self.local, self.total)

    def done(self, steps: int) -> int:
        """The number of rounds that are done after `steps` steps: the inverse of `after`."""
        rounds = -(-steps // self.local)
        if self.after(rounds) != steps:
            raise JobError(
                f"a state after {steps} steps lies within a round of {self.local} local steps",
                hint="it was saved by another strategy or at the end of a shorter run: begin with its weights (--from)",
            )
        return rounds

    def group(self, replica: int) -> Range:
        return group_of(self.schedule.shards, self.replicas, replica)

    def occupied(self, number: int) -> int:
        """The number of replicas with samples in this round. They are always the first ones."""
        most = max(self.schedule.occupied(step) for step in self.steps(number))
        return sum(1 for replica in range(self.replicas) if self.group(replica)[0] < most)
