from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distbelief.control.messages import Timing
from distbelief.coordinator.rules.assignment import equal, proportional
from distbelief.coordinator.rules.balance import (
    ENOUGH,
    INTERVAL_S,
    KEPT,
    MIN_SHARDS,
    Look,
    Speeds,
    assign,
    explain,
    fastest,
    look,
    propose,
)
from distbelief.shards import Range

FOUR = [0, 1, 2, 3]
Pace = Callable[[int], float]


class Cluster:
    """Members that compute steps of 1 s and send a heartbeat after each; `pace` gives seconds per shard."""

    def __init__(self, members: Sequence[int], shards: int) -> None:
        self.members = list(members)
        self.speeds = Speeds()
        self.now = 0.0
        self.begin(equal(shards, len(members)))

    def begin(self, ranges: list[Range]) -> None:
        self.ranges = ranges
        self.busy_s = dict.fromkeys(self.members, 0.0)
        self.done = dict.fromkeys(self.members, 0)
        self.speeds = self.speeds.restart(self.members)
        self.beat()

    def beat(self) -> None:
        for worker in self.members:
            timing = Timing(self.busy_s[worker] / 4, self.busy_s[worker] * 3 / 4, 9.0, self.done[worker])
            self.speeds = self.speeds.observe(worker, timing, self.now)

    def run(self, steps: int, pace: Pace) -> None:
        for _ in range(steps):
            self.now += 1.0
            for worker, (first, end) in zip(self.members, self.ranges, strict=True):
                self.busy_s[worker] += (end - first) * pace(worker)
                self.done[worker] += end - first
            self.beat()


def three_times_slower(worker: int) -> float:
    return 0.3 if worker == 1 else 0.1


def step_s(ranges: Sequence[Range], shard_s: Sequence[float]) -> float:
    return max((end - first) * each for (first, end), each in zip(ranges, shard_s, strict=True))


# --- speeds ----------------------------------------------------------------------------------------------------------


def test_the_estimate_is_data_and_compute_per_shard_and_not_the_exchange() -> None:
    cluster = Cluster(FOUR, 16)
    cluster.run(ENOUGH, three_times_slower)
    assert [cluster.speeds.shard_s(worker) for worker in FOUR] == pytest.approx([0.1, 0.3, 0.1, 0.1])
    assert cluster.speeds.seen(1) == 4 * ENOUGH


def test_too_few_measurements_give_no_estimate() -> None:
    cluster = Cluster(FOUR, 16)
    cluster.run(ENOUGH - 1, three_times_slower)
    assert cluster.speeds.shard_s(1) is None
    assert cluster.speeds.shard_s(77) is None


def test_one_outlier_does_not_count() -> None:
    cluster = Cluster(FOUR, 16)
    cluster.run(4, lambda _: 0.1)
    cluster.run(1, lambda worker: 10.0 if worker == 2 else 0.1)
    assert cluster.speeds.shard_s(2) == pytest.approx(0.1)


def test_a_lasting_change_is_seen_within_the_window() -> None:
    cluster = Cluster(FOUR, 16)
    cluster.run(50, lambda _: 0.1)
    cluster.run(KEPT // 2 + 1, three_times_slower)
    assert cluster.speeds.shard_s(1) == pytest.approx(0.3)


def test_a_new_generation_keeps_what_is_known_and_forgets_who_is_gone() -> None:
    cluster = Cluster(FOUR, 16)
    cluster.run(ENOUGH, three_times_slower)
    speeds = cluster.speeds.restart([1, 2, 9])
    assert speeds.shard_s(1) == pytest.approx(0.3)
    assert speeds.seen(1) == 0
    assert speeds.shard_s(0) is None
    assert speeds.shard_s(9) is None
    # Counters begin at 0 again; the first ones only open the interval.
    speeds = speeds.observe(1, Timing(0.0, 0.5, 0.0, 1), 100.0)
    assert speeds.shard_s(1) == pytest.approx(0.3)
    assert speeds.seen(1) == 1


@pytest.mark.parametrize(
    "late", [Timing(0.1, 0.1, 0.0, 1), Timing(math.nan, 1.0, 0.0, 99), Timing(0.0, math.inf, 0, 99)]
)
def test_overtaken_and_senseless_counters_change_nothing(late: Timing) -> None:
    cluster = Cluster(FOUR, 16)
    cluster.run(5, three_times_slower)
    assert cluster.speeds.observe(1, late, cluster.now + 5) is cluster.speeds


def test_a_clock_that_is_set_back_does_not_stop_the_measuring() -> None:
    cluster = Cluster(FOUR, 16)
    cluster.run(5, lambda _: 0.1)
    cluster.now -= 3600
    cluster.run(KEPT, three_times_slower)
    assert cluster.speeds.shard_s(1) == pytest.approx(0.3)


def test_an_observation_changes_no_older_value() -> None:
    cluster = Cluster(FOUR, 16)
    cluster.run(5, lambda _: 0.1)
    before = cluster.speeds
    cluster.run(10, lambda _: 0.7)
    assert before.shard_s(0) == pytest.approx(0.1)


def test_ten_thousand_workers_cost_a_page_per_observation() -> None:
    workers = range(10_000)
    pages = Speeds()
    for worker in workers:
        pages = pages.observe(worker, Timing(), 0.0)
    after = pages.observe(5_000, Timing(compute_s=1.0, shards=1), 1.0)
    changed = [number for number in after._pages if after._pages[number] is not pages._pages.get(number)]
    copied = len(after._pages) + sum(len(after._pages[number]) for number in changed)
    assert len(changed) == 1
    assert copied < 300  # pointers, of 10,000 workers
    assert sum(map(len, after._pages.values())) == len(workers)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200), st.floats(0, 10), st.integers(0, 50)), max_size=100))
def test_memory_is_bounded_by_the_workers(beats: list[tuple[int, float, int]]) -> None:
    speeds = Speeds()
    for at, (worker, busy_s, shards) in enumerate(beats):
        speeds = speeds.observe(worker, Timing(compute_s=busy_s * at, shards=shards * at), at * INTERVAL_S)
    tracks = [track for page in speeds._pages.values() for track in page.values()]
    assert len(tracks) == len({worker for worker, _, _ in beats})
    assert all(len(track.recent) <= KEPT for track in tracks)
    kept = speeds.restart(range(10))
    assert sum(map(len, kept._pages.values())) <= 10


# --- assignments -----------------------------------------------------------------------------------------------------


@st.composite
def assignments(draw: st.DrawFn, most: int = 40, members: int = 8) -> tuple[list[Range], list[float]]:
    count = draw(st.integers(1, members))
    shards = draw(st.integers(count, most))
    cuts = (
        sorted(draw(st.sets(st.integers(1, shards - 1), min_size=count - 1, max_size=count - 1))) if count > 1 else []
    )
    shard_s = draw(st.lists(st.floats(1e-3, 1e3) | st.sampled_from([1.0, 2.0, 3.0]), min_size=count, max_size=count))
    return list(pairwise([0, *cuts, shards])), shard_s


def check_ranges(ranges: Sequence[Range], shards: int) -> None:
    assert ranges[0][0] == 0
    assert ranges[-1][1] == shards
    assert all(left[1] == right[0] for left, right in pairwise(ranges))
    assert all(first < end for first, end in ranges)


@settings(deadline=None)
@given(assignments())
def test_ranges_cover_all_shards_and_the_step_is_never_slower(case: tuple[list[Range], list[float]]) -> None:
    old, shard_s = case
    new = fastest(old, shard_s)
    check_ranges(new, old[-1][1])
    assert step_s(new, shard_s) <= step_s(old, shard_s)
    assert step_s(new, shard_s) <= step_s(proportional(old[-1][1], [1 / each for each in shard_s]), shard_s)


@settings(deadline=None)
@given(assignments(most=10, members=4))
def test_nothing_is_faster_and_nothing_as_fast_moves_less(case: tuple[list[Range], list[float]]) -> None:
    old, shard_s = case
    shards = old[-1][1]
    every = [list(pairwise([0, *cuts, shards])) for cuts in combinations(range(1, shards), len(old) - 1)]

    def moved(ranges: Sequence[Range]) -> int:
        return sum(abs(was[1] - now[1]) for was, now in zip(old, ranges, strict=True))

    new = fastest(old, shard_s)
    best_s = min(step_s(ranges, shard_s) for ranges in every)
    assert step_s(new, shard_s) == best_s
    assert moved(new) == min(moved(ranges) for ranges in every if step_s(ranges, shard_s) == best_s)


def test_one_of_four_three_times_slower_reaches_90_percent_of_the_sum_of_speeds() -> None:
    cluster = Cluster(FOUR, 16)
    cluster.run(ENOUGH, three_times_slower)
    new = propose(cluster.ranges, FOUR, cluster.speeds)
    assert new is not None
    shard_s = [three_times_slower(worker) for worker in FOUR]
    possible = sum(1 / each for each in shard_s)
    assert 16 / step_s(new, shard_s) >= 0.9 * possible
    assert 16 / step_s(cluster.ranges, shard_s) < 0.5 * possible


@settings(max_examples=60, deadline=None)
@given(assignments(), st.integers(0, 2**32))
def test_a_proposal_pays_by_its_own_estimates(case: tuple[list[Range], list[float]], seed: int) -> None:
    ranges, shard_s = case
    noise = random.Random(seed)
    cluster = Cluster(range(len(ranges)), ranges[-1][1])
    cluster.begin(ranges)
    cluster.run(KEPT, lambda worker: shard_s[worker] * noise.uniform(0.8, 1.2))
    new = propose(ranges, cluster.members, cluster.speeds)
    if new is not None:
        check_ranges(new, ranges[-1][1])
        measured = [cluster.speeds.shard_s(worker) or 0.0 for worker in cluster.members]
        assert step_s(new, measured) <= 0.9 * step_s(ranges, measured)
    check_ranges(assign(ranges[-1][1], cluster.members, cluster.speeds), ranges[-1][1])


def test_a_small_gain_does_not_pay() -> None:
    cluster = Cluster(FOUR, 64)
    cluster.run(KEPT, lambda worker: 0.108 if worker == 1 else 0.1)
    assert propose(cluster.ranges, FOUR, cluster.speeds) is None
    assert propose(cluster.ranges, FOUR, cluster.speeds, min_gain=0.01) is not None


def test_a_member_without_an_estimate_stops_the_proposal() -> None:
    cluster = Cluster(FOUR, 16)
    cluster.run(ENOUGH, three_times_slower)
    assert propose(equal(16, 5), [*FOUR, 4], cluster.speeds) is None


def test_too_few_shards_in_this_generation_stop_the_proposal() -> None:
    cluster = Cluster(FOUR, 16)
    cluster.run(ENOUGH, three_times_slower)
    cluster.begin(equal(16, 4))
    assert propose(cluster.ranges, FOUR, cluster.speeds) is None
    cluster.run(math.ceil(MIN_SHARDS / 4), three_times_slower)
    assert propose(cluster.ranges, FOUR, cluster.speeds) is not None


def test_a_gain_that_the_spread_explains_is_no_gain() -> None:
    cluster = Cluster(FOUR, 64)
    wild = iter([0.1, 0.5, 0.12, 0.4, 0.15, 0.3, 0.2] * 4)
    cluster.run(KEPT, lambda _: next(wild))
    assert propose(cluster.ranges, FOUR, cluster.speeds) is None


def test_measurements_that_agree_by_luck_among_noisy_members_prove_little() -> None:
    def proposal(noise: Sequence[float]) -> list[Range] | None:
        cluster = Cluster(FOUR, 64)
        for amount in noise:
            cluster.run(1, lambda worker, amount=amount: 0.15 if worker == 3 else 0.1 + amount)  # type: ignore[misc]
        return propose(cluster.ranges, FOUR, cluster.speeds)

    assert proposal([0.0] * KEPT) is not None
    assert proposal([-0.02, -0.01, 0.0, 0.01, 0.02, 0.0, 0.01]) is None


def test_ranges_and_members_must_match() -> None:
    with pytest.raises(ValueError, match="4 ranges for 3 members"):
        propose(equal(16, 4), [0, 1, 2], Speeds())


def test_a_new_membership_uses_what_is_known() -> None:
    assert assign(16, FOUR, Speeds()) == equal(16, 4)
    cluster = Cluster(FOUR, 16)
    cluster.run(KEPT, lambda worker: 0.1 + 0.001 * worker)
    assert assign(16, [0, 1, 2, 7], cluster.speeds) == equal(16, 4)
    slow = Cluster(FOUR, 16)
    slow.run(KEPT, three_times_slower)
    assert assign(16, [0, 1, 3, 7], slow.speeds) == [(0, 5), (5, 6), (6, 11), (11, 16)]


# --- looks -----------------------------------------------------------------------------------------------------------


def test_a_proposal_must_hold_in_two_looks() -> None:
    cluster = Cluster(FOUR, 16)
    cluster.run(ENOUGH, three_times_slower)
    state, taken = look(Look(), cluster.ranges, FOUR, cluster.speeds)
    assert taken is None
    cluster.run(2, three_times_slower)
    state, taken = look(state, cluster.ranges, FOUR, cluster.speeds)
    assert taken is not None
    assert state == Look()


def test_a_look_at_other_members_or_ranges_begins_anew() -> None:
    cluster = Cluster(FOUR, 16)
    cluster.run(ENOUGH, three_times_slower)
    state, _ = look(Look(), [(0, 3), (3, 8), (8, 12), (12, 16)], FOUR, cluster.speeds)
    assert state.proposed
    state, taken = look(state, cluster.ranges, FOUR, cluster.speeds)
    assert taken is None
    _, taken = look(state, cluster.ranges, FOUR, cluster.speeds)
    assert taken is not None


def test_a_passing_slowness_is_forgotten() -> None:
    cluster = Cluster(FOUR, 16)
    cluster.run(KEPT, three_times_slower)
    state, _ = look(Look(), cluster.ranges, FOUR, cluster.speeds)
    assert state.proposed
    cluster.run(KEPT, lambda _: 0.1)
    state, taken = look(state, cluster.ranges, FOUR, cluster.speeds)
    assert (state, taken) == (Look(), None)


def looks(cluster: Cluster, count: int, pace: Pace) -> int:
    state, taken = Look(), 0
    for _ in range(count):
        cluster.run(3, pace)
        state, new = look(state, cluster.ranges, cluster.members, cluster.speeds)
        if new is not None:
            taken += 1
            cluster.begin(new)
    return taken


@pytest.mark.parametrize("amount", [0.1, 0.3])
@pytest.mark.parametrize(("members", "shards"), [(4, 16), (4, 64), (2, 8), (3, 100)])
def test_noise_never_moves_a_shard(members: int, shards: int, amount: float) -> None:
    noise = random.Random(members * 1000 + shards)
    cluster = Cluster(range(members), shards)
    assert looks(cluster, 1000, lambda _: 0.1 * noise.uniform(1 - amount, 1 + amount)) == 0


def test_noise_never_moves_a_shard_of_many_members() -> None:
    noise = random.Random(5)
    cluster = Cluster(range(200), 3000)
    assert looks(cluster, 40, lambda _: 0.1 * noise.uniform(0.9, 1.1)) == 0


def test_a_slow_member_among_noise_costs_one_change_and_its_recovery_another() -> None:
    noise = random.Random(3)
    cluster = Cluster(FOUR, 16)
    assert looks(cluster, 300, lambda worker: three_times_slower(worker) * noise.uniform(0.9, 1.1)) == 1
    assert cluster.ranges == [(0, 5), (5, 6), (6, 11), (11, 16)]
    assert looks(cluster, 300, lambda _: 0.1 * noise.uniform(0.9, 1.1)) == 1
    assert cluster.ranges == equal(16, 4)


# --- words -----------------------------------------------------------------------------------------------------------


def test_a_slow_member_is_explained() -> None:
    cluster = Cluster(FOUR, 16)
    cluster.run(KEPT, three_times_slower)
    new = fastest(cluster.ranges, [0.1, 0.3, 0.1, 0.1])
    assert explain(cluster.ranges, new, FOUR, cluster.speeds) == (
        "worker 1 needs 3.0 times as long per shard as the others: "
        "it has 1 of 16 shards now instead of 4 (predicted +140 % speed)"
    )


def test_a_fast_member_and_one_that_has_recovered_are_explained() -> None:
    cluster = Cluster([0, 8], 16)
    cluster.run(KEPT, lambda worker: 0.1 if worker == 0 else 0.05)
    text = explain(cluster.ranges, [(0, 5), (5, 16)], [0, 8], cluster.speeds)
    assert text.startswith("worker 0 needs 2.0 times as long per shard as the other: it has 5 of 16 shards now")
    text = explain([(0, 12), (12, 16)], [(0, 5), (5, 16)], [0, 8], cluster.speeds)
    assert text.startswith("worker 8 needs only 50 % of the time per shard of the other: it has 11 of 16 shards now")
    cluster.run(KEPT, lambda _: 0.1)
    text = explain([(0, 4), (4, 16)], cluster.ranges, [0, 8], cluster.speeds)
    assert text.startswith(
        "worker 0 needs about as long per shard as the other: it has 8 of 16 shards now instead of 4"
    )


def test_an_unmeasured_membership_is_explained_without_numbers() -> None:
    assert "not every member's speed is known" in explain(equal(4, 2), equal(4, 2), [0, 1], Speeds())
