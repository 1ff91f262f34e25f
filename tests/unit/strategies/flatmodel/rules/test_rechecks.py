"""Which shards are rechecked, by whom, and the verdict on a difference: plain calls."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distbelief.options import NEVER, RecheckPlan, recheck_plan
from distbelief.strategies.flatmodel.rules.rechecks import (
    Dispute,
    Results,
    Verdict,
    choose_shift,
    judge_results,
    last_good,
    next_recheck,
    rechecked,
    shifts,
    third_member,
    without_memory,
)

SEEDS = st.integers(0, 1 << 40)


def rechecks(seed: int, plan: RecheckPlan, steps: int) -> list[int]:
    found, step = [], 0
    while (step := next_recheck(seed, step, plan)) < steps:
        found.append(step)
        step += 1
    return found


@given(SEEDS, st.integers(1, 40))
def test_every_window_has_one_recheck_wherever_a_member_begins(seed: int, every: int) -> None:
    plan = RecheckPlan(every)
    found = rechecks(seed, plan, 10 * every)
    assert [step // every for step in found] == list(range(10))
    for step in range(9 * every):
        assert next_recheck(seed, step, plan) == next(one for one in found if one >= step)


def test_never_and_all() -> None:
    assert next_recheck(1, 0, NEVER) == -1
    assert rechecks(1, recheck_plan("all"), 5) == [0, 1, 2, 3, 4]


@given(SEEDS, st.integers(0, 10**6), st.integers(1, 300))
def test_one_shard_in_eight_at_least_one_and_never_an_empty_one(seed: int, step: int, occupied: int) -> None:
    few = rechecked(seed, step, occupied, whole=False)
    assert len(set(few)) == len(few) == -(-occupied // 8)
    assert set(few) <= set(range(occupied))
    assert rechecked(seed, step, occupied, whole=True) == list(range(occupied))


def test_all_shards_have_their_turn() -> None:
    count = [0] * 8
    for step in range(8000):
        count[rechecked(5, step, 8, whole=False)[0]] += 1
    assert min(count) > 800


def test_the_cost_of_the_default_is_below_one_per_cent_for_any_number_of_workers() -> None:
    """More shards computed per window, and more time: the member with most rechecks delays the step by them."""
    plan = recheck_plan("auto")
    for shards in (1, 2, 4, 8, 16, 64, 256):
        for workers in {n for n in (1, 2, 3, 4, 8, 16, 64, 256) if n <= shards}:
            for step in range(20):
                few = rechecked(3, step, shards, whole=False)
                ranges = [(r * shards // workers, (r + 1) * shards // workers) for r in range(workers)]
                most = max(sum(first <= shard < end for shard in few) for first, end in ranges)
                usual = max(end - first for first, end in ranges)
                assert len(few) / (shards * plan.every) < 0.01
                assert most / (usual * plan.every) < 0.01


@pytest.mark.parametrize(("workers", "stated"), [(2, 64), (4, 192), (8, 448), (64, 448)])
def test_a_member_takes_part_in_a_recheck_within_the_stated_expected_delay(workers: int, stated: int) -> None:
    """docs/recheck.md states the delays. A member is found out as owner and as checker."""
    plan, shards = recheck_plan("auto"), max(8, workers)
    best, delays = shifts(["a"] * workers), []
    for seed in range(2000):
        step = 0
        while True:
            step = next_recheck(seed, step, plan)
            shift = choose_shift(seed, step, best)
            owners = {shard * workers // shards for shard in rechecked(seed, step, shards, whole=False)}
            if 1 in owners | {(owner + shift) % workers for owner in owners}:
                break
            step += 1
        delays.append(step)
    mean = sum(delays) / len(delays)
    assert 0.85 * stated < mean < 1.15 * stated


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=9))
def test_a_shift_gives_every_member_the_work_of_one_other_and_prefers_other_hosts(hosts: list[str]) -> None:
    size, best = len(hosts), shifts(hosts)

    def away(shift: int) -> int:
        return sum(hosts[rank] != hosts[(rank + shift) % size] for rank in range(size))

    assert best
    assert all(1 <= shift < size for shift in best)
    assert {away(shift) for shift in best} == {max(away(shift) for shift in range(1, size))}
    assert choose_shift(1, 2, best) in best


def test_two_hosts_check_each_other() -> None:
    assert shifts(["a", "a", "a", "b", "b", "b"]) == [3]
    assert shifts(["a"]) == [0], "a single member checks itself"


def test_the_third_is_on_a_host_of_its_own_if_there_is_one() -> None:
    assert third_member(0, 1, ["a", "b"]) is None
    assert third_member(0, 1, ["a", "a", "a"]) == 2
    assert third_member(0, 2, ["a", "a", "b", "b", "c"]) == 4
    assert third_member(0, 0, ["a"]) is None


A, B, C = 10, 20, 30


def judge(owner: tuple[int, int], checker: tuple[int, int], third: int | None, hosts: str) -> Verdict:
    last = None if third is None else Results(2, (third,))
    return judge_results(Results(0, owner), Results(1, checker), last, list(hosts))


@pytest.mark.parametrize("hosts", ["aaa", "abc", "aab"])
@pytest.mark.parametrize("third", [None, A])
def test_a_difference_that_passes_names_the_member_that_corrects_itself(hosts: str, third: int | None) -> None:
    assert judge((B, A), (A, A), third, hosts) == Verdict("passing", (0,), (1,))
    assert judge((A, A), (B, A), third, hosts) == Verdict("passing", (1,), (0,))


def test_a_third_that_differs_is_named_too_but_it_was_not_asked_again() -> None:
    verdict = judge((B, A), (A, A), C, "abc")
    assert verdict == Verdict("passing", (0,), (1,), 2)
    assert (
        Dispute(137, 3, verdict, {0: "Ann", 1: "Bob", 2: "Cid"})
        .notice()
        .startswith(
            "Ann computed wrong gradients of shard 3 of step 137, once; computed again they equal those of Bob, and "
            "the step continues with these. Cid, which computed them once, got different ones. "
        )
    )


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
def test_the_majority_decides(hosts: str) -> None:
    assert judge((B, B), (A, A), A, hosts) == Verdict("majority", (0,), (1, 2))
    assert judge((A, A), (B, B), A, hosts) == Verdict("majority", (1,), (0, 2))
    assert judge((A, A), (B, C), A, hosts) == Verdict("majority", (1,), (0, 2)), "its result changes"


def test_hosts_vote_not_their_members() -> None:
    assert judge((A, A), (B, B), A, "aba") == Verdict("open", (0, 1, 2)), "a host with two members has one vote"
    assert judge((A, A), (B, B), B, "aba") == Verdict("majority", (0,), (1, 2)), "a member of its own host disagrees"


def test_without_a_majority_all_are_named() -> None:
    assert judge((A, A), (B, B), None, "ab") == Verdict("open", (0, 1))
    assert judge((A, A), (B, B), C, "abc") == Verdict("open", (0, 1, 2))


def test_results_that_change_each_time_are_hidden_state() -> None:
    assert judge((A, B), (C, 40), 50, "abc") == Verdict("unsteady", (0, 1, 2))
    assert judge((A, B), (C, 40), None, "ab") == Verdict("unsteady", (0, 1))
    assert judge((A, B), (C, B), None, "ab") == Verdict("unsteady", (0, 1)), "equal now, and never before"
    alone = judge_results(Results(0, (A, C)), Results(0, (B, 40)), None, ["a"])
    assert alone == Verdict("unsteady", (0,))


def test_no_majority_of_members_that_changed_their_minds() -> None:
    assert judge((A, A), (C, B), B, "abc").kind != "majority"


@given(st.tuples(*[st.integers(0, 2)] * 5), st.sampled_from(["aaa", "aab", "aba", "baa", "abc"]))
def test_the_run_goes_on_only_with_a_result_that_two_computations_of_owner_and_checker_gave(
    results: tuple[int, ...], hosts: str
) -> None:
    one, two, three, four, five = results
    if one == three:
        return  # there is no dispute
    for third in (None, five):
        found = judge((one, two), (three, four), third, hosts)
        assert (found.kind == "passing") == (two == four and two in (one, three))
        assert found.wrong
        assert not set(found.wrong) & set(found.right)


def test_texts_name_members_parameters_step_shard_and_the_last_good_step() -> None:
    names = {0: "worker 4 on ant", 1: "worker 5 on bee", 2: "worker 6 on cat"}
    parts = ["0.weight", "0.bias", "2.weight", "2.bias"]
    majority = Dispute(137, 3, Verdict("majority", (1,), (0, 2)), names, parts)
    assert majority.message() == (
        "worker 5 on bee computed other gradients of shard 3 of step 137 (0.weight, 0.bias, 2.weight and 1 more) than "
        "worker 4 on ant and worker 6 on cat, also when asked again"
    )
    for kind, wrong in itertools.product(["open", "unsteady"], [(0, 1)]):
        text = Dispute(137, 3, Verdict(kind, wrong), names, parts).message()  # type: ignore[arg-type]
        assert all(part in text for part in ("worker 4 on ant", "worker 5 on bee", "shard 3 of step 137", "0.bias"))
    assert "worker 5 on bee" in Dispute(137, 3, Verdict("passing", (1,), (0,)), names).notice()
    assert "have rechecked no step before it" in last_good(5, RecheckPlan(10), -1)
    for kind in ("majority", "open", "unsteady"):
        hint = Dispute(137, 3, Verdict(kind, (0, 1)), names).hint()  # type: ignore[arg-type]
        assert "keeps random results, or data that differ between workers (docs/purity.md)" in hint
    assert "The last step whose recheck agreed is 3; the steps after it" in last_good(5, RecheckPlan(10), 3)
    assert "The last good step is 4: all of its shards" in last_good(5, recheck_plan("all"), 4)


def test_members_without_memory_are_named() -> None:
    assert without_memory(["Ann"], 7_600_000).startswith("Ann has no memory for rechecks (7.6 MB): its checks are left")
    assert without_memory(["Ann", "Bob"], 10).startswith("Ann and Bob have no memory for rechecks")
