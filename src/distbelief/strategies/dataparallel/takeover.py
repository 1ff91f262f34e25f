"""What each member computes in a step, and how all partial sums are added: in the ordinary case, and when a step is
taken over from a generation that did not finish it. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distbelief.shards import Program, Range, program
from distbelief.strategies.flatmodel.partials import Partials, ShardWork, partial_sums
from distbelief.transport.exchange import PublishedSum, Source


@dataclass(frozen=True)
class StepWork:
    """What this member computes in a step and how all partial sums are added."""

    partials: Partials
    mine: Sequence[Range]
    """The shards that this member answers for."""
    sources: Sequence[Source]
    order: Program
    recomputed: int = 0
    """Shards that are computed although an earlier generation began the step."""


def plan_step(shards: int, occupied: int, ranges: Sequence[Range], rank: int) -> StepWork:
    """An ordinary step: everybody computes its own range."""
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
    """A step that others began: what they have published is used, what is missing is divided anew.

    >>> plan = plan_takeover(4, 4, [PublishedSum((0, 2), Source(0, 0, back=1))], members=2, rank=1)
    >>> [work.shard for work in plan.partials.work], plan.order, plan.recomputed
    ([3], (0, (1, 2)), 2)
    """
    there = {shard for one in held for shard in range(*one.node)}
    missing = [shard for shard in range(occupied) if shard not in there]
    parts = [missing[r * len(missing) // members : (r + 1) * len(missing) // members] for r in range(members)]
    everybody = [_together([partial_sums(shards, occupied, run) for run in _runs(part)]) for part in parts]
    return _work(shards, occupied, everybody, held, rank, _runs(parts[rank]), recomputed=len(missing))


def plan_finish(held: Sequence[PublishedSum]) -> StepWork:
    """A step of fused parts that is applied in part: it is finished with what made it certain, which the last ones that
    computed have left. (Those after them found it so, and computed nothing.)

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
    return StepWork(everybody[rank], mine, sources, order, recomputed)


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
    """Several ranges of one member as one list of work, each in slots of its own."""
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
