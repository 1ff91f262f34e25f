"""Taking a step over: whatever earlier generations have left of it, the sum is the tree's, with every shard in it once.

Sums are symbolic here: a shard is its number and a sum is a pair, so another bracketing is another value.
"""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distbelief.shards import Program, Range
from distbelief.strategies.flatmodel.rules.stepwork import StepWork, plan_step, plan_takeover
from distbelief.transport.exchange import PublishedSum, Source
from tests.support.replicas.bracketing import Bracketing, execute, plain_tree

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a noisy machine is no failure

Slots = dict[tuple[int, int, int], Bracketing]
"""(generation, rank, slot) -> what lies there"""


@st.composite
def stories(draw: st.DrawFn) -> tuple[int, int, list[Range], list[set[int]], list[int]]:
    """(V, occupied shards, the first generation's ranges, who arrived in each lost one, how many are in each later).
    The last one finishes the step."""
    shards = draw(st.integers(1, 24))
    edges = [0, *sorted(draw(st.lists(st.integers(0, shards), max_size=5))), shards]
    ranges = list(itertools.pairwise(edges))
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    arrived = [set(draw(st.lists(st.integers(0, size - 1), max_size=size))) for size in [len(ranges), *sizes[:-1]]]
    return shards, draw(st.integers(1, shards)), ranges, arrived, sizes


def publish(plans: list[StepWork], arrived: set[int], generation: int, slots: Slots) -> list[tuple[Range, int, int]]:
    """(subtree, rank, slot) of what those who arrived have published; the others' slots hold anything."""
    found = []
    for rank, plan in enumerate(plans):
        if rank in arrived:
            contents = execute(plan.partials)
            slots |= {(generation, rank, slot): contents[slot] for slot in plan.partials.results.values()}
            found += [(node, rank, slot) for node, slot in plan.partials.results.items()]
    return found


def total(plan: StepWork, generation: int, slots: Slots) -> Bracketing:
    sums = [slots[generation - source.back, source.rank, source.slot] for source in plan.sources]

    def bracketing(order: Program) -> Bracketing:
        return sums[order] if isinstance(order, int) else (bracketing(order[0]), bracketing(order[1]))

    return bracketing(plan.order)


def leaves(sum_: Bracketing) -> list[int]:
    return [sum_] if isinstance(sum_, int) else leaves(sum_[0]) + leaves(sum_[1])


@patient
@given(stories())
def test_however_often_a_step_is_taken_over_the_sum_is_that_of_an_undisturbed_one(
    story: tuple[int, int, list[Range], list[set[int]], list[int]],
) -> None:
    shards, occupied, ranges, arrivals, sizes = story
    slots: Slots = {}
    plans = [plan_step(shards, occupied, ranges, rank) for rank in range(len(ranges))]
    published: list[tuple[Range, Source, int]] = []
    for generation, (arrived, members) in enumerate(zip(arrivals, sizes, strict=True), start=1):
        done = publish(plans, arrived, generation, slots)
        published += [(node, Source(rank, slot), generation) for node, rank, slot in done]
        now = generation + 1
        held = [PublishedSum(node, Source(at.rank, at.slot, now - then)) for node, at, then in published]
        plans = [plan_takeover(shards, occupied, held, members, rank) for rank in range(members)]
        missing = set(range(occupied)) - {shard for node, *_ in published for shard in range(*node)}
        assert {plan.recomputed for plan in plans} == {len(missing)}
        computed = [work.shard for plan in plans for work in plan.partials.work]
        assert sorted(computed) == sorted(missing), "what is there is not computed again, the rest once"
        assert [list(itertools.chain(*(range(*mine) for mine in plan.mine))) for plan in plans] == [
            [work.shard for work in plan.partials.work] for plan in plans
        ]
        sizes_of_parts = [len(plan.partials.work) for plan in plans]
        assert max(sizes_of_parts) - min(sizes_of_parts) <= 1, "the missing ones are divided evenly"
    last = len(sizes) + 1
    publish(plans, set(range(sizes[-1])), last, slots)
    assert len({(tuple(plan.sources), plan.order) for plan in plans}) == 1, "all members have the same plan"
    found = total(plans[0], last, slots)
    assert found == plain_tree((0, shards), occupied)
    assert sorted(leaves(found)) == list(range(occupied)), "every shard once"


@patient
@given(stories())
def test_no_slot_of_a_member_is_used_for_two_things_at_once(
    story: tuple[int, int, list[Range], list[set[int]], list[int]],
) -> None:
    shards, occupied, ranges, arrivals, sizes = story
    plans = [plan_step(shards, occupied, ranges, rank) for rank in range(len(ranges))]
    there = [(node, rank, slot) for node, rank, slot in publish(plans, arrivals[0], 1, {})]
    held = [PublishedSum(node, Source(rank, slot, 1)) for node, rank, slot in there]
    for rank in range(sizes[0]):
        plan = plan_takeover(shards, occupied, held, sizes[0], rank)
        wanted: set[int] = set()
        for work in plan.partials.work:
            assert work.slot not in wanted
            wanted.add(work.slot)
            for into, other in work.additions:
                assert {into, other} <= wanted
                wanted.discard(other)
        assert set(plan.partials.results.values()) == wanted


def test_with_everything_there_nobody_computes_anything() -> None:
    held = [PublishedSum((0, 4), Source(0, 0, 1)), PublishedSum((4, 8), Source(1, 0, 1))]
    plans = [plan_takeover(8, 8, held, 3, rank) for rank in range(3)]
    assert all(not plan.partials.work and not plan.mine for plan in plans)
    assert plans[0].sources == [Source(0, 0, 1), Source(1, 0, 1)]
    assert plans[0].order == (0, 1)


def test_with_nothing_there_it_is_an_ordinary_step_with_the_shards_divided_evenly() -> None:
    plans = [plan_takeover(8, 8, [], 2, rank) for rank in range(2)]
    usual = [plan_step(8, 8, [(0, 4), (4, 8)], rank) for rank in range(2)]
    assert [(p.partials, p.sources, p.order) for p in plans] == [(p.partials, p.sources, p.order) for p in usual]
    assert [plan.recomputed for plan in plans] == [8, 8]
