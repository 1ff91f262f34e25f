"""The partial sums of a step: when they are complete, which shards all slices have, and who computes late shards."""

from __future__ import annotations

import itertools
import random

from distbelief.shards import Range, split
from distbelief.strategies.ps.protocol.messages import Inspected
from distbelief.strategies.ps.rules.gathering import StepSums, choose_late_shards, shards_on_all_slices

SHARDS = 5


def nodes(node: Range = (0, SHARDS)) -> list[Range]:
    """All nodes of the tree over the shards."""
    if node[1] - node[0] == 1:
        return [node]
    left, right = split(node)
    return [node, *nodes(left), *nodes(right)]


def test_the_sums_of_a_step_are_complete_exactly_when_all_occupied_shards_are_there() -> None:
    chance = random.Random(2)
    for _ in range(300):
        occupied = chance.randint(1, SHARDS)
        gathered: StepSums[Range] = StepSums(SHARDS, occupied)
        there: set[int] = set()
        for node in chance.sample(nodes(), len(nodes())):
            contained = set(range(*node)) <= there and node not in gathered.sums
            new = gathered.add(node, node)
            there |= set(range(*node))
            assert not (new and any(a <= node[0] and node[1] <= b for a, b in gathered.sums if (a, b) != node))
            assert new or contained or node in gathered.sums
            covered = sorted(gathered.sums)
            assert all(one[1] <= other[0] for one, other in itertools.pairwise(covered))
            assert gathered.values() == covered
            assert (gathered.order() is not None) == ({*range(occupied)} <= there)


def has(version: int, *sums: Range) -> Inspected:
    return Inspected(0, 0, version, list(sums))


def test_a_slice_that_has_applied_the_step_proves_that_all_shards_are_on_all_slices() -> None:
    assert shards_on_all_slices([has(3), has(2, (0, 1)), has(2)], SHARDS) == [(0, SHARDS)]


def test_a_shard_that_one_slice_misses_is_computed_again() -> None:
    whole, part = has(2, (0, SHARDS)), has(2, (0, 2), (3, 4))
    assert shards_on_all_slices([whole, part, whole], SHARDS) == [(0, 1), (1, 2), (3, 4)]
    assert shards_on_all_slices([whole, has(2)], SHARDS) == []


def test_the_members_that_miss_most_are_helped_and_not_before_they_are_late() -> None:
    ranges = [(0, 2), (2, 4), (4, 6), (6, 8)]
    late = {4, 5, 7}
    assert choose_late_shards(late, ranges, rank=0, backups=1, elapsed_s=2.9, shard_s=1.0) == []
    assert choose_late_shards(late, ranges, rank=0, backups=1, elapsed_s=3.1, shard_s=1.0) == [5, 4]
    assert choose_late_shards(late, ranges, rank=0, backups=2, elapsed_s=3.1, shard_s=1.0) == [5, 4, 7]
    first = {rank: choose_late_shards(late, ranges, rank, backups=1, elapsed_s=3.1, shard_s=1.0)[0] for rank in (0, 1)}
    assert set(first.values()) == {4, 5}  # not both the same
    left_out = choose_late_shards({0, 1}, ranges, rank=0, backups=1, elapsed_s=0.0, shard_s=1.0)
    assert left_out == [0, 1]  # its own
