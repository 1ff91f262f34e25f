"""The partial sums of the step under way: the present sums, the missing shards, and who computes them. Pure.

A partial sum is named by its range of shards. Every worker that computes it gets the same bits, and a node of the tree
is the sum of its children. So a slice takes partial sums from any worker and in any order: it only needs all shards.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from distbelief.shards import Program, Range, program
from distbelief.strategies.ps.protocol.messages import Inspected

LATE = 1.5
"""A member is late when its shards take more than this many times as long as the helper would need for them."""

Sum = TypeVar("Sum")


@dataclass
class StepSums(Generic[Sum]):
    """A slice's partial sums of the step under way.

    >>> step = StepSums(shards=4, occupied=4)
    >>> step.add((0, 1), "a"), step.add((0, 2), "b"), step.add((1, 2), "c"), sorted(step.sums)
    (True, True, False, [(0, 2)])
    >>> step.order() is None, step.add((2, 4), "d"), step.order()
    (True, True, (0, 1))
    """

    shards: int
    occupied: int
    sums: dict[Range, Sum] = field(default_factory=dict)

    def add(self, node: Range, value: Sum) -> bool:
        """Keep a partial sum in place of the sums that it contains. False: a present sum contains it already."""
        if any(first <= node[0] and node[1] <= end for first, end in self.sums):
            return False
        inside = [known for known in self.sums if node[0] <= known[0] and known[1] <= node[1]]
        for known in inside:
            del self.sums[known]
        self.sums[node] = value
        return True

    def order(self) -> Program | None:
        """The order in which to add the sums (see `values`); None: shards are missing."""
        try:
            return program(self.shards, self.occupied, {node: n for n, node in enumerate(sorted(self.sums))})
        except KeyError:
            return None

    def values(self) -> list[Sum]:
        return [self.sums[node] for node in sorted(self.sums)]


def shards_on_all_slices(looked: Sequence[Inspected], shards: int) -> list[Range]:
    """The shards of the oldest step under way that every slice has in some partial sum, one by one.

    `looked`: what each slice has answered. A slice that has applied the step proves that all others have every sum of
    it: no slice applies a step before that.

    >>> shards_on_all_slices([Inspected(0, 0, 7, [(0, 2)]), Inspected(0, 1, 7, [(1, 2), (3, 4)])], shards=4)
    [(1, 2)]
    >>> shards_on_all_slices([Inspected(0, 0, 7, [(0, 2)]), Inspected(0, 1, 8, [])], shards=4)
    [(0, 4)]
    """
    version = min(one.version for one in looked)
    if any(one.version > version for one in looked):
        return [(0, shards)]
    there = [{shard for first, end in one.nodes for shard in range(first, end)} for one in looked]
    return [(shard, shard + 1) for shard in sorted(set.intersection(*there))]


def choose_late_shards(
    missing: Collection[int], ranges: Sequence[Range], rank: int, backups: int, elapsed_s: float, shard_s: float
) -> list[int]:
    """The missing shards that member `rank` computes, the first one first: the shards that it has left out itself,
    then shards of late members.

    The `backups` late members that miss most shards are helped, each from its last shard on. Several helpers begin at
    different shards. `shard_s`: how long the helper takes for a shard.

    >>> ranges = [(0, 2), (2, 4), (4, 8)]
    >>> choose_late_shards({2, 3, 4, 5, 6, 7}, ranges, rank=0, backups=1, elapsed_s=9.0, shard_s=1.0)
    [7, 6, 5, 4]
    >>> choose_late_shards({2, 3, 4, 5, 6, 7}, ranges, rank=0, backups=2, elapsed_s=4.0, shard_s=1.0)
    [3, 2]
    """
    mine = [shard for shard in range(*ranges[rank]) if shard in missing]
    late = {
        other: [shard for shard in reversed(range(first, end)) if shard in missing]
        for other, (first, end) in enumerate(ranges)
        if other != rank and elapsed_s > LATE * shard_s * (end - first)
    }
    worst = sorted((other for other in late if late[other]), key=lambda other: (-len(late[other]), other))[:backups]
    found = [shard for other in worst for shard in late[other]]
    helpers = [other for other, some in enumerate(ranges) if not any(shard in missing for shard in range(*some))]
    if rank in helpers and found:
        start = helpers.index(rank) * len(found) // len(helpers)
        found = found[start:] + found[:start]
    return mine + found
