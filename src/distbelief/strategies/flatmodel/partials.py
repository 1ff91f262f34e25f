"""How a member turns its range of shards into partial sums: a short list of operations on slots. Pure.

The shards are computed one after the other; two neighbours in the tree are added as soon as both are there, so a
member needs only about log2(shards) slots, and what is left at the end are the largest subtrees inside its range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from distbelief.shards import Range, cover, split


@dataclass(frozen=True)
class ShardWork:
    """Compute `shard` into `slot`; then for each (into, other): slot `into` += slot `other`."""

    shard: int
    slot: int
    additions: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Partials:
    work: tuple[ShardWork, ...]
    results: dict[Range, int]
    """Subtree -> the slot that holds its sum at the end."""

    @cached_property
    def complete_with(self) -> dict[int, list[tuple[Range, int]]]:
        """Shard -> the subtrees whose sum is there once it is computed, and their slots.

        >>> partial_sums(8, 8, (3, 8)).complete_with
        {3: [((3, 4), 0)], 7: [((4, 8), 1)]}
        """
        found: dict[int, list[tuple[Range, int]]] = {}
        for (first, end), slot in self.results.items():
            last = max((one.shard for one in self.work if first <= one.shard < end), default=first)
            found.setdefault(last, []).append(((first, end), slot))
        return found


def partial_sums(shards: int, occupied: int, mine: Range) -> Partials:
    """The operations for the range `mine`, when only the first `occupied` shards of the step have samples.

    >>> plan = partial_sums(8, 8, (4, 8))
    >>> [(w.shard, w.slot, w.additions) for w in plan.work]
    [(4, 0, ()), (5, 1, ((0, 1),)), (6, 1, ()), (7, 2, ((1, 2), (0, 1)))]
    >>> plan.results
    {(4, 8): 0}
    """
    work: list[ShardWork] = []
    free: list[int] = []
    used = 0

    def take() -> int:
        nonlocal used
        if free:
            return free.pop()
        used += 1
        return used - 1

    def add_after_last(into: int, other: int) -> None:
        last = work[-1]
        work[-1] = ShardWork(last.shard, last.slot, (*last.additions, (into, other)))

    def visit(node: Range) -> int:
        if node[1] - node[0] == 1:
            work.append(ShardWork(node[0], take(), ()))
            return work[-1].slot
        left, right = split(node)
        into = visit(left)
        if right[0] < occupied:
            other = visit(right)
            add_after_last(into, other)
            free.append(other)
        return into

    results = {node: visit(node) for node in cover(shards, mine) if node[0] < occupied}
    return Partials(tuple(work), results)


def slots_needed(shards: int, mine: Range) -> int:
    """The most slots that any step of this range uses."""
    return 1 + max((w.slot for w in partial_sums(shards, shards, mine).work), default=0)


def reached(work: Sequence[ShardWork]) -> dict[Range, int]:
    """The sums that are there after these units of work, the first ones of a plan -> their slots.

    >>> plan = partial_sums(8, 8, (4, 8))
    >>> reached(plan.work[:3]), reached(plan.work) == plan.results
    ({(4, 6): 0, (6, 7): 1}, True)
    """
    held: dict[int, Range] = {}
    for unit in work:
        held[unit.slot] = (unit.shard, unit.shard + 1)
        for into, other in unit.additions:
            held[into] = (held[into][0], held.pop(other)[1])
    return {node: slot for slot, node in sorted(held.items(), key=lambda pair: pair[1])}
