"""Who computes which portions: all of them once, by whoever is there; only the last ones twice."""

from __future__ import annotations

import doctest
import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distbelief.shards import Range, split
from distbelief.strategies.sandblaster.rules import portions as portioning
from distbelief.strategies.sandblaster.rules.portions import MOST_TOGETHER, Portioning


def nodes(node: Range) -> set[Range]:
    if node[1] - node[0] == 1:
        return {node}
    left, right = split(node)
    return {node} | nodes(left) | nodes(right)


def losses(node: Range) -> list[tuple[float, float]]:
    return [(0.1 * portion, 1.0 + portion) for portion in range(*node)]


@settings(max_examples=60, deadline=None)
@given(portions=st.integers(1, 70), workers=st.integers(1, 5), seed=st.integers(0, 99))
def test_every_portion_is_given_as_a_node_of_the_tree_and_the_total_is_that_of_all(
    portions: int, workers: int, seed: int
) -> None:
    """Some workers are slow, and some of what they do is forgotten with them."""
    dice, tree = random.Random(seed), nodes((0, portions))
    work = Portioning(portions)
    work.begin(3, workers)
    busy: dict[int, Range] = {}
    given_away = 0
    for turn in range(10_000):
        worker, now = dice.randrange(workers), 0.1 * turn
        if worker in busy:
            node = busy.pop(worker)
            if dice.random() < 0.9:
                work.computed(worker, 3, node, losses(node), now)
        if node := work.take(worker, now):
            assert node in tree
            assert node[1] - node[0] <= MOST_TOGETHER
            busy[worker], given_away = node, given_away + 1
        if work.total():
            break
    assert given_away >= -(-portions // MOST_TOGETHER)
    expected = math.fsum(0.1 * p for p in range(portions)), math.fsum(1.0 + p for p in range(portions))
    assert work.total() == expected


def test_whoever_is_faster_takes_more_and_the_last_nodes_are_small() -> None:
    work = Portioning(64)
    work.begin(1, members=2)
    sizes: dict[int, list[int]] = {0: [], 1: []}
    ready = {0: 0.0, 1: 0.0}  # when a worker is done with what it has
    held: dict[int, Range] = {}
    for _ in range(200):
        worker = min(ready, key=lambda one: ready[one])
        now = ready[worker]
        if worker in held:
            work.computed(worker, 1, held[worker], losses(held[worker]), now)
        node = work.take(worker, now)
        if node is None:
            break
        held[worker] = node
        sizes[worker].append(node[1] - node[0])
        ready[worker] = now + (node[1] - node[0]) * (1.0 if worker == 0 else 4.0)
    assert sizes[0][0] == 8
    assert sizes[0][-1] == 1
    assert sum(sizes[0]) > 2.5 * sum(sizes[1])


def test_a_late_portion_is_given_to_another_and_the_first_copy_counts() -> None:
    work = Portioning(3)
    work.begin(5, members=3)
    assert [work.take(worker, 0.0) for worker in range(3)] == [(0, 1), (1, 2), (2, 3)]
    work.computed(0, 5, (0, 1), [(1.0, 1.0)], now=1.0)
    assert work.take(0, 1.5) is None  # the others are not late yet
    assert work.take(0, 2.5) == (1, 2)
    assert work.take(3, 2.5) == (2, 3)
    assert work.take(4, 9.0) is None  # two have each of them
    work.computed(0, 5, (1, 2), [(2.0, 1.0)], now=3.5)
    work.computed(1, 5, (1, 2), [(2.0, 1.0)], now=4.0)
    work.computed(2, 5, (2, 3), [(3.0, 1.0)], now=4.0)
    assert work.total() == (6.0, 3.0)


def test_after_a_change_of_members_nothing_is_given_before_the_point_is_shown_again_and_nothing_done_is_lost() -> None:
    work = Portioning(4)
    work.begin(5, members=1)
    node = work.take(0, 0.0)
    assert node == (0, 1)
    work.computed(0, 5, node, losses(node), 1.0)
    work.take(0, 1.0)
    work.gather(members=2)
    assert (work.take(1, 2.0), work.total()) == (None, None)
    work = msgspec.msgpack.decode(msgspec.msgpack.encode(work), type=Portioning)  # on another server
    work.begin(5, members=2)
    assert [work.take(worker, 2.0) for worker in (1, 2, 3)] == [(1, 2), (2, 3), (3, 4)]
    work.begin(6, members=2)
    assert work.take(1, 2.0) == (0, 1)  # another point: from the beginning
    work.computed(2, 5, (2, 3), [(1.0, 1.0)], 3.0)
    assert work.losses == {}


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan])
def test_a_loss_that_is_no_number_makes_the_total_none(loss: float) -> None:
    work = Portioning(2)
    work.begin(1, members=1)
    work.computed(0, 1, (0, 1), [(loss, 2.0)], 0.0)
    work.computed(0, 1, (1, 2), [(-loss, 2.0)], 0.0)
    total = work.total()
    assert total is not None
    assert math.isnan(total[0])
    assert total[1] == 4.0


def test_examples() -> None:
    assert doctest.testmod(portioning).failed == 0
