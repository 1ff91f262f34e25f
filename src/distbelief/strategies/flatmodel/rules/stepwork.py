"""The plan of a step: each member's shards, the order in which all partial sums are added, and the verdict on the step.
Pure: members with the same numbers make the same plan and come to the same verdict.

- `partial_sums`: how one member turns its range of shards into partial sums, as operations on slots. It computes the
  shards one after the other and adds two neighbours in the tree as soon as both are there. So it needs only about
  log2(shards) slots, and the results are the largest subtrees inside its range.
- `plan_step`, `plan_apart`: the work of all members in an ordinary step.
- `plan_takeover`, `plan_finish`: the work in a step that an earlier generation began and did not finish.
- `worth_a_backup`: which shards of late members another member should compute too.
- `judge_rows`: the loss and the fingerprint of a step from the numbers of its shards, or the error for which the step
  is not applied.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from distbelief.errors import JobError, NonFiniteLoss
from distbelief.shards import Program, Range, cover, program, split
from distbelief.strategies.base import StepResult
from distbelief.transport.exchange import ROW, PublishedSum, Source

LOSS, WEIGHT, INTEGERS, COUNTS = range(ROW)
"""The numbers that a shard reports: see `ShardResult`; COUNTS is its number of samples."""


@dataclass(frozen=True)
class ShardWork:
    """Compute `shard` into `slot`; then for each (into, other): slot `into` += slot `other`."""

    shard: int
    slot: int
    additions: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Partials:
    """The operations of one member, and where its partial sums are at the end."""

    work: tuple[ShardWork, ...]
    results: dict[Range, int]
    """Subtree -> the slot that holds its sum at the end."""

    @cached_property
    def complete_with(self) -> dict[int, list[tuple[Range, int]]]:
        """Shard -> the subtrees whose sums are complete once it is computed, and their slots.

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
    """The sums that are complete after these first units of a plan -> their slots.

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


@dataclass(frozen=True)
class StepWork:
    """One member's work in a step, and the order in which all partial sums are added."""

    partials: Partials
    mine: Sequence[Range]
    """The shards whose rows this member contributes."""
    sources: Sequence[Source]
    order: Program
    recomputed: int = 0
    """The number of shards that are computed although an earlier generation began the step."""
    computed_by: Mapping[int, int] = field(default_factory=dict)
    """Shard -> the rank that computes it. Shards whose sums an earlier generation published are not in it."""
    everybody: Sequence[Partials] = ()
    """Each rank's operations."""


def plan_step(shards: int, occupied: int, ranges: Sequence[Range], rank: int) -> StepWork:
    """An ordinary step: every member computes its own range."""
    return _work(shards, occupied, [partial_sums(shards, occupied, mine) for mine in ranges], [], rank, [ranges[rank]])


def plan_apart(shards: int, occupied: int, ranges: Sequence[Range], rank: int) -> StepWork:
    """An ordinary step in which every shard is a partial sum of its own, in a slot of its own."""
    everybody = []
    for first, end in ranges:
        mine = range(first, min(end, occupied))
        work = tuple(ShardWork(shard, shard - first, ()) for shard in mine)
        everybody.append(Partials(work, {(shard, shard + 1): shard - first for shard in mine}))
    return _work(shards, occupied, everybody, [], rank, [ranges[rank]])


def plan_takeover(shards: int, occupied: int, held: Sequence[PublishedSum], members: int, rank: int) -> StepWork:
    """A step that an earlier generation began: its published sums are used, and the missing shards are divided among
    members.

    >>> plan = plan_takeover(4, 4, [PublishedSum((0, 2), Source(0, 0, back=1))], members=2, rank=1)
    >>> [work.shard for work in plan.partials.work], plan.order, plan.recomputed
    ([3], (0, (1, 2)), 2)
    """
    there = {shard for one in held for shard in range(*one.node)}
    missing = [shard for shard in range(occupied) if shard not in there]
    shares = [missing[r * len(missing) // members : (r + 1) * len(missing) // members] for r in range(members)]
    everybody = [_together([partial_sums(shards, occupied, run) for run in _runs(share)]) for share in shares]
    return _work(shards, occupied, everybody, held, rank, _runs(shares[rank]), recomputed=len(missing))


def plan_finish(held: Sequence[PublishedSum]) -> StepWork:
    """The rest of a step that is applied in part, in inexact mode (fused batches). The plan uses the partial sums of
    the latest generation that published any; generations after that one computed none.

    >>> plan = plan_finish([PublishedSum((0, 3), Source(0, 0, back=2)), PublishedSum((3, 8), Source(1, 0, back=2))])
    >>> plan.sources, plan.order
    ([Source(rank=0, slot=0, back=2), Source(rank=1, slot=0, back=2)], (0, 1))
    """
    latest = min(one.source.back for one in held)
    sources = [one.source for one in sorted(held, key=lambda one: one.node) if one.source.back == latest]
    order = program(len(sources), len(sources), {(part, part + 1): part for part in range(len(sources))})
    return StepWork(Partials((), {}), [], sources, order)


def _work(
    shards: int,
    occupied: int,
    everybody: Sequence[Partials],
    held: Sequence[PublishedSum],
    rank: int,
    mine: Sequence[Range],
    recomputed: int = 0,
) -> StepWork:
    found = [(one.node, one.source) for one in held]
    for owner, partials in enumerate(everybody):
        found += [(node, Source(owner, slot)) for node, slot in partials.results.items()]
    found.sort(key=lambda pair: pair[0])
    sources = [source for _, source in found]
    order = program(shards, occupied, {node: number for number, (node, _) in enumerate(found)})
    computed_by = {unit.shard: owner for owner, partials in enumerate(everybody) for unit in partials.work}
    return StepWork(everybody[rank], mine, sources, order, recomputed, computed_by, everybody)


def _runs(shards: Sequence[int]) -> list[Range]:
    """
    >>> _runs([1, 2, 5])
    [(1, 3), (5, 6)]
    """
    runs: list[Range] = []
    for shard in shards:
        if runs and runs[-1][1] == shard:
            runs[-1] = (runs[-1][0], shard + 1)
        else:
            runs.append((shard, shard + 1))
    return runs


def _together(several: Sequence[Partials]) -> Partials:
    """Several ranges of one member as one list of work; each range has its own slots."""
    work: list[ShardWork] = []
    results: dict[Range, int] = {}
    used = 0
    for partials in several:
        for unit in partials.work:
            additions = tuple((into + used, other + used) for into, other in unit.additions)
            work.append(ShardWork(unit.shard, unit.slot + used, additions))
        results |= {node: slot + used for node, slot in partials.results.items()}
        used += 1 + max(unit.slot for unit in partials.work)
    return Partials(tuple(work), results)


_WORTH = 1.2
"""A backup must be expected before the late member would start the shard, by this margin."""


@dataclass(frozen=True)
class LateMember:
    """A member that still computes its shards."""

    shards: Sequence[int]
    """All of its shards of this step, in its order of computation."""
    begun: int


def worth_a_backup(late: Sequence[LateMember], elapsed_s: float, mine_s: float) -> list[int]:
    """The shards that are worth a backup, the most urgent first.

    `elapsed_s`: how long the step has lasted; `mine_s`: how long one shard takes this member. A member's last shard is
    the most urgent: the member itself would begin it last.

    >>> worth_a_backup([LateMember([4, 5, 6, 7], begun=1)], elapsed_s=3.0, mine_s=1.0)
    [7, 6, 5]
    >>> worth_a_backup([LateMember([4, 5, 6, 7], begun=3)], elapsed_s=3.0, mine_s=1.5)
    []
    """
    found: list[tuple[float, int]] = []
    for member in late:
        shard_s = elapsed_s / max(member.begun - 0.5, 0.5)  # the shard under way counts half
        for ahead, shard in enumerate(member.shards[member.begun :]):
            starts_in_s = (ahead + 0.5) * shard_s
            if starts_in_s > _WORTH * mine_s:
                found.append((starts_in_s, shard))
    return [shard for _, shard in sorted(found, reverse=True)]


def judge_rows(step: int, rows: np.ndarray) -> StepResult:
    """The result of a step, from the rows of all its shards."""
    found = judge(step, rows[:, LOSS], rows[:, WEIGHT], rows[:, COUNTS], rows.tobytes())
    if len(set(rows[rows[:, COUNTS] > 0, INTEGERS])) > 1:
        raise integers_differ()
    return found


def integers_differ() -> JobError:
    return JobError(
        "an integer buffer of the model has other values after one shard than after another: it depends on the "
        "samples, so there is no single value to go on with"
    )


def judge(step: int, losses: np.ndarray, weights: np.ndarray, samples: np.ndarray, reports: bytes) -> StepResult:
    """The loss and the fingerprint of a step, or the error NonFiniteLoss. `losses`, `weights` and `samples` have one
    number per shard; `reports` are the bytes that the fingerprint covers.

    >>> judge(3, np.array([1.0, 2.0]), np.array([2.0, 4.0]), np.array([2, 4]), b"").loss
    0.5
    """
    bad = np.flatnonzero(~np.isfinite(losses) | ~np.isfinite(weights))
    if len(bad):
        raise NonFiniteLoss(float(losses[bad[0]]), step, int(bad[0]))
    weight = math.fsum(weights)
    loss = math.fsum(losses) / weight if weight else 0.0
    return StepResult(loss, int(samples.sum()), hashlib.blake2b(reports, digest_size=8).hexdigest())
