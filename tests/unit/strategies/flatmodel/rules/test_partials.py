"""Partial sums: whoever holds which shards, executing everybody's operations gives the tree's bracketing exactly."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distbelief.shards import Program, Range
from distbelief.strategies.flatmodel.rules.stepwork import partial_sums, plan_step, slots_needed
from tests.support.replicas.bracketing import Bracketing, execute, plain_tree

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a noisy machine is no failure


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, list[Range]]:
    """(V, occupied shards, everybody's ranges)"""
    shards = draw(st.integers(1, 40))
    edges = [0, *sorted(draw(st.lists(st.integers(0, shards), max_size=8))), shards]
    return shards, draw(st.integers(1, shards)), list(itertools.pairwise(edges))


@patient
@given(cases())
def test_the_results_are_the_trees_own_sums(case: tuple[int, int, list[Range]]) -> None:
    shards, occupied, ranges = case
    for mine in ranges:
        partials = partial_sums(shards, occupied, mine)
        slots = execute(partials)
        assert {node: slots[slot] for node, slot in partials.results.items()} == {
            node: plain_tree(node, occupied) for node in partials.results
        }
        assert len(set(partials.results.values())) == len(partials.results)


@patient
@given(cases())
def test_every_occupied_shard_is_computed_once_in_order(case: tuple[int, int, list[Range]]) -> None:
    shards, occupied, ranges = case
    computed = [work.shard for mine in ranges for work in partial_sums(shards, occupied, mine).work]
    assert computed == list(range(occupied))


@patient
@given(cases())
def test_a_shard_is_never_computed_into_a_slot_that_is_still_wanted(case: tuple[int, int, list[Range]]) -> None:
    shards, occupied, ranges = case
    for mine in ranges:
        wanted: set[int] = set()
        for work in partial_sums(shards, occupied, mine).work:
            assert work.slot not in wanted
            wanted.add(work.slot)
            for into, other in work.additions:
                assert {into, other} <= wanted
                wanted.discard(other)


@patient
@given(cases())
def test_the_slots_suffice_in_every_step_and_are_few(case: tuple[int, int, list[Range]]) -> None:
    shards, occupied, ranges = case
    for mine in ranges:
        needed = slots_needed(shards, mine)
        used = [
            slot for work in partial_sums(shards, occupied, mine).work for slot in (work.slot, *sum(work.additions, ()))
        ]
        assert max(used, default=0) < needed
        assert needed <= 2 * shards.bit_length() + 1


@patient
@given(cases())
def test_all_members_together_give_the_bracketing_of_the_full_tree(case: tuple[int, int, list[Range]]) -> None:
    shards, occupied, ranges = case
    plans = [plan_step(shards, occupied, ranges, rank) for rank in range(len(ranges))]
    slots = [execute(plan.partials) for plan in plans]
    for plan in plans:
        assert (plan.sources, plan.order) == (plans[0].sources, plans[0].order)
        assert plan.recomputed == 0
    assert [plan.mine for plan in plans] == [[mine] for mine in ranges]
    sums = [slots[source.rank][source.slot] for source in plans[0].sources]

    def bracketing(order: Program) -> Bracketing:
        return sums[order] if isinstance(order, int) else (bracketing(order[0]), bracketing(order[1]))

    assert bracketing(plans[0].order) == plain_tree((0, shards), occupied)  # type: ignore[arg-type]


def test_a_power_of_two_split_evenly_leaves_one_partial_sum_per_member() -> None:
    for members in (1, 2, 4, 8):
        ranges = [(rank * 8 // members, (rank + 1) * 8 // members) for rank in range(members)]
        assert [len(partial_sums(8, 8, mine).results) for mine in ranges] == [1] * members
