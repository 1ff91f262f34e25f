"""Rechecks with real members: who computes wrongly is named, and nothing wrong is committed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore

from distbelief.options import NEVER, RecheckPlan, recheck_plan
from distbelief.shards import Schedule
from distbelief.strategies.flatmodel.rules.rechecks import next_recheck
from tests.support.replicas.dying import POINTS, Death, Script, Survived
from tests.support.replicas.flipping import FLIPPED, Ended, Flip, LaterFlip, Play
from tests.support.replicas.member import GLOBAL_BATCH, SAMPLES
from tests.support.stage import Stage

MEMBER = "tests.support.replicas.flipping"
DYING = "tests.support.replicas.dying"
SHARDS, STEPS, SEED = 8, 5, 11
ALL = recheck_plan("all")
ONE, TWO, THREE = ((0, 8),), ((0, 4), (4, 8)), ((0, 3), (3, 5), (5, 8))

_names = itertools.count()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def play(stage: Stage, script: Play) -> list[Ended]:
    found = stage.play(MEMBER, "train", [{"rank": rank, "play": script} for rank in range(len(script.ranges))])
    assert len({(one.sha256, one.applied, one.error) for one in found}) == 1, "all members come to the same end"
    return found


@pytest.fixture(scope="module")
def twin(stage: Stage) -> str:
    """The weights of an undisturbed run."""
    return play(stage, Play(TWO, STEPS))[0].sha256


@pytest.mark.parametrize("ranges", [ONE, TWO, THREE])
def test_a_recheck_of_every_shard_changes_no_bit_and_computes_each_twice(
    stage: Stage, twin: str, ranges: tuple[tuple[int, int], ...]
) -> None:
    found = play(stage, Play(ranges, STEPS, ALL))
    assert found[0].sha256 == twin
    assert not any(one.error or one.news for one in found)
    schedule = Schedule(SAMPLES, GLOBAL_BATCH, SHARDS)
    assert sum(one.computed for one in found) == 2 * sum(schedule.occupied(step) for step in range(STEPS))


def test_without_clipping_too(stage: Stage) -> None:
    """Then each sum is requested once, and all go through one buffer."""
    never, every = (play(stage, Play(THREE, STEPS, plan, clips=False))[0] for plan in (NEVER, ALL))
    assert (every.sha256, every.error) == (never.sha256, "")


@pytest.mark.parametrize("over_gloo", [False, True])
def test_equal_gradients_agree_when_they_are_nan(stage: Stage, port: int, over_gloo: bool) -> None:
    """NaN != NaN, also as the square of a norm for clipping."""
    where = {"port": port, "name": f"recheck {next(_names)}"} if over_gloo else {}
    found = play(stage, Play(TWO, 1, ALL, nan_gradient=True, **where))
    assert (found[0].error, found[0].applied) == ("", 1)


def test_without_a_recheck_one_flipped_bit_changes_the_weights(stage: Stage, twin: str) -> None:
    flips = (Flip(0, 3, 6), Flip(1, 3, 6))  # whichever of them computes the shard: it may be a backup
    assert play(stage, Play(TWO, STEPS, NEVER, flips))[0].sha256 != twin


@pytest.mark.parametrize(
    ("ranges", "shard", "over_gloo"),
    [(TWO, 3, False), (THREE, 6, False), (TWO, 6, True), (THREE, 3, True)],
)
def test_a_single_flip_of_the_owner_is_caught_before_the_commit(
    stage: Stage, port: int, twin: str, ranges: tuple[tuple[int, int], ...], shard: int, over_gloo: bool
) -> None:
    owner = next(rank for rank, (first, end) in enumerate(ranges) if first <= shard < end)
    where = {"port": port, "name": f"recheck {next(_names)}"} if over_gloo else {}
    found = play(stage, Play(ranges, STEPS, ALL, (Flip(owner, 3, shard, times=1),), **where))
    assert found[0].error == ""
    assert found[0].sha256 == twin
    [notice] = found[0].news
    assert notice.startswith(f"worker {10 + owner} on this host computed wrong gradients of shard {shard} of step 3")
    assert not any(one.news for one in found[1:]), "only rank 0 reports"


def test_a_single_flip_in_the_recheck_itself_is_told_from_one_of_the_owner(stage: Stage, twin: str) -> None:
    found = play(stage, Play(TWO, STEPS, ALL, (Flip(0, 3, 6, times=1),)))  # shard 6 is that of member 1
    assert found[0].sha256 == twin
    assert found[0].news[0].startswith("worker 10 on this host computed wrong gradients of shard 6 of step 3")


def test_flips_in_several_shards_of_one_step_are_all_caught(stage: Stage, twin: str) -> None:
    flips = (Flip(0, 3, 1, times=1), Flip(0, 3, 2, times=1), Flip(1, 3, 5, times=1))
    found = play(stage, Play(TWO, STEPS, ALL, flips))
    assert (found[0].error, found[0].sha256) == ("", twin)
    assert len(found[0].news) == 2, "member 0 computed all of its shards again at once, then member 1"


@pytest.mark.parametrize("over_gloo", [False, True])
def test_a_member_whose_every_gradient_has_a_flipped_bit_is_named_by_the_majority(
    stage: Stage, port: int, over_gloo: bool
) -> None:
    where = {"port": port, "name": f"recheck {next(_names)}"} if over_gloo else {}
    hosts = ("ant", "bee", "cat")
    [first, *_] = play(stage, Play(THREE, STEPS, ALL, (Flip(1),), hosts, **where))
    assert first.applied == first.at[0] == 0, "nothing wrong was committed"
    assert first.error.startswith(f"worker 11 on bee computed other gradients of shard {first.at[1]} of step 0 (")
    assert f"({FLIPPED})" in first.error, "only the parameter with the flipped bit"
    assert "worker 10 on ant" in first.error
    assert "worker 12 on cat" in first.error
    assert "have rechecked no step before it" in first.error
    assert "resume" in first.hint


def test_two_members_that_differ_are_both_named(stage: Stage) -> None:
    [first, _] = play(stage, Play(TWO, STEPS, ALL, (Flip(1, 3),), ("ant", "bee")))
    assert first.error.startswith(
        "worker 10 on ant and worker 11 on bee computed different gradients of shard 0 of step 3"
    )
    assert first.at[0] == first.applied == 3
    assert "The last good step is 2: all of its shards were computed twice" in first.error
    assert "one of them computes wrongly" in first.hint


def test_two_members_of_one_host_are_no_majority_against_another_host(stage: Stage) -> None:
    [first, *_] = play(stage, Play(THREE, STEPS, ALL, (Flip(2),), ("ant", "ant", "bee")))
    assert "computed different gradients" in first.error
    assert "worker 12 on bee" in first.error


def test_at_the_default_rate_the_member_is_named_in_the_first_recheck(stage: Stage) -> None:
    plan = recheck_plan("auto")
    due = next_recheck(SEED, 0, plan)
    [first, _] = play(stage, Play(TWO, 2 * plan.every, plan, (Flip(1, -1),)))
    assert first.at[0] == first.applied == due < plan.every
    assert "different gradients" in first.error


def test_the_last_step_whose_recheck_agreed_is_said(stage: Stage) -> None:
    plan = RecheckPlan(4)
    first, second = (next_recheck(SEED, 0, plan), next_recheck(SEED, 4, plan))
    [one, _] = play(stage, Play(TWO, 12, plan, tuple(Flip(1, step) for step in range(second, 12))))
    assert one.at[0] == second
    assert f"The last step whose recheck agreed is {first}; the steps after it were committed without" in one.error


def test_a_member_alone_computes_a_shard_twice_itself(stage: Stage, twin: str) -> None:
    [one] = play(stage, Play(ONE, STEPS, ALL, (Flip(0, 3, 6, times=1),)))
    assert (one.error, one.sha256) == ("", twin)
    assert "worker 10 on this host computed different gradients of shard 6 of step 3 in two attempts" in one.news[0]


@pytest.mark.parametrize("ranges", [ONE, TWO, THREE])
def test_code_that_counts_its_calls_is_told_from_a_machine_that_computes_wrongly(
    stage: Stage, ranges: tuple[tuple[int, int], ...]
) -> None:
    found = play(stage, Play(ranges, STEPS, ALL, counts_calls=True))
    assert found[0].applied == 0
    assert "were others each time" in found[0].error
    assert "keeps state of its own" in found[0].hint


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("where", "clips"),
    [("sum", True), ("update", True), ("norm", True), ("state", True), ("sum", False), ("update", False)],
)
def test_on_one_host_a_flip_after_the_gradients_is_caught_before_the_commit(
    stage: Stage, where: str, clips: bool, rank: int
) -> None:
    """In a sum, an update, the norm for clipping, or in the state between two steps: the run ends."""
    script = Play(THREE, STEPS, ALL, hosts=("ant",) * 3, later=LaterFlip(rank, 2, where), clips=clips)
    found = stage.play(MEMBER, "train", [{"rank": number, "play": script} for number in range(3)])
    step = 3 if where == "state" else 2
    assert {one.applied for one in found} == {step}, "the step is not committed"
    errors = [one.error for one in found if one.error != "aborted"]
    assert errors
    for error in errors:
        assert "got different values of" in error
        assert f"Step {step} was not committed. The last good step is {step - 1}" in error
        assert error.count("on ant") == 2, "owner and witness are named"


def test_without_rechecks_such_flips_change_the_weights(stage: Stage, twin: str) -> None:
    for where in ("sum", "update", "norm", "state"):
        assert play(stage, Play(THREE, STEPS, later=LaterFlip(1, 2, where)))[0].sha256 != twin, where


GLOO = ("copy", "update", "norm", "rows")
"""Where a flip is in what one member alone has."""


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("ranges", [ONE, TWO, THREE])
def test_over_gloo_a_recheck_of_every_shard_changes_no_bit(
    stage: Stage, port: int, ranges: tuple[tuple[int, int], ...], clips: bool
) -> None:
    never, every = (
        play(stage, Play(ranges, STEPS, plan, port=port, name=f"recheck {next(_names)}", clips=clips))[0]
        for plan in (NEVER, ALL)
    )
    assert (every.sha256, every.error) == (never.sha256, "")


@pytest.mark.parametrize(
    ("ranges", "where", "rank"),
    [
        *((ranges, where, 1) for ranges in (TWO, THREE) for where in ("sum", *GLOO, "state", "optimizer")),
        (TWO, "sum", 0),
        (THREE, "copy", 2),
        (THREE, "optimizer", 0),
    ],
)
def test_over_gloo_a_flip_after_the_gradients_is_caught_before_the_commit(
    stage: Stage, port: int, ranges: tuple[tuple[int, int], ...], where: str, rank: int
) -> None:
    """With three hosts the host with the flip alone is named, except of a sum; with two hosts both are."""
    hosts = ("ant", "bee", "cat")[: len(ranges)]
    later = LaterFlip(rank, 2, where)
    script = Play(ranges, STEPS, ALL, hosts=hosts, port=port, name=f"recheck {next(_names)}", later=later)
    found = stage.play(MEMBER, "train", [{"rank": number, "play": script} for number in range(len(ranges))])
    step = 3 if where in ("state", "optimizer") else 2
    assert {one.applied for one in found} == {step}, "the step is not committed"
    assert len({one.error for one in found} - {"aborted"}) == 1
    error = next(one.error for one in found if one.error != "aborted")
    assert f"worker {10 + rank} on {hosts[rank]}" in error
    assert f"Step {step} was not committed. The last good step is {step - 1}" in error
    if where == "rows" or (len(ranges) == 3 and where != "sum"):
        assert error.startswith(f"worker {10 + rank} on {hosts[rank]} ")
    else:
        assert all(f" on {host}" in error for host in hosts) or where == "sum"


@pytest.mark.parametrize("over_gloo", [False, True])
@pytest.mark.parametrize("ranges", [TWO, THREE])
def test_a_flip_while_a_member_adds_up_its_own_shards_is_caught_before_any_sum_is_published(
    stage: Stage, port: int, ranges: tuple[tuple[int, int], ...], over_gloo: bool
) -> None:
    where = {"port": port, "name": f"recheck {next(_names)}"} if over_gloo else {}
    last = len(ranges) - 1
    script = Play(ranges, STEPS, ALL, later=LaterFlip(last, 3, "partial"), **where)
    found = stage.play(MEMBER, "train", [{"rank": number, "play": script} for number in range(len(ranges))])
    assert {one.applied for one in found} == {3}
    error = next(one.error for one in found if one.error != "aborted")
    assert "got different sums of the gradients of shards" in error
    assert f"worker {10 + last} on this host" in error
    assert "Step 3 was not committed. The last good step is 2" in error


@pytest.mark.parametrize("over_gloo", [False, True])
@pytest.mark.parametrize("ranges", [TWO, THREE])
def test_a_flip_in_a_partial_sum_that_has_been_compared_names_the_member_whose_memory_it_is(
    stage: Stage, port: int, ranges: tuple[tuple[int, int], ...], over_gloo: bool
) -> None:
    where = {"port": port, "name": f"recheck {next(_names)}"} if over_gloo else {}
    script = Play(ranges, STEPS, ALL, later=LaterFlip(1, 3, "published"), **where)
    found = stage.play(MEMBER, "train", [{"rank": number, "play": script} for number in range(len(ranges))])
    assert {one.applied for one in found} == {3}
    error = next(one.error for one in found if one.error != "aborted")
    assert "of step 3 changed in the memory of worker 11 on this host. Step 3 was not committed" in error


def test_over_gloo_without_rechecks_such_flips_change_the_weights(stage: Stage, port: int, twin: str) -> None:
    for where in ("partial", "sum"):
        script = Play(THREE, STEPS, later=LaterFlip(2, 3, where), port=port, name=f"recheck {next(_names)}")
        assert play(stage, script)[0].sha256 != twin, where
    for where in (*GLOO, "state", "optimizer"):
        script = Play(THREE, STEPS, later=LaterFlip(1, 2, where), port=port, name=f"recheck {next(_names)}")
        found = stage.play(MEMBER, "train", [{"rank": number, "play": script} for number in range(3)])
        assert any(one.sha256 != twin for one in found), where


NEW_POINTS = ["in a recheck", "before the comparison", "after the comparison"]


@pytest.fixture(scope="module")
def undisturbed(stage: Stage) -> Survived:
    [alone] = stage.play(DYING, "train", [{"worker": 0, "script": Script(SHARDS, (0,), ())}])
    found: Survived = alone
    return found


@pytest.mark.parametrize(
    ("point", "victim"), [*((point, 2) for point in [*POINTS, *NEW_POINTS]), *((point, 0) for point in NEW_POINTS)]
)
def test_a_death_in_a_step_that_is_rechecked_changes_no_bit(
    stage: Stage, undisturbed: Survived, point: str, victim: int
) -> None:
    """The survivors recheck what they compute; what was published had been rechecked before."""
    script = Script(SHARDS, (0, 1, 2), (Death(victim, 3, point),), recheck=ALL)
    outcomes = stage.outcomes(DYING, "train", [{"worker": worker, "script": script} for worker in (0, 1, 2)])
    assert not [one.error for one in outcomes if one.error]
    found = [one.value for worker, one in enumerate(outcomes) if worker != victim]
    assert all(one.sha256 == undisturbed.sha256 for one in found)
    assert all(one.fingerprints == undisturbed.fingerprints for one in found)


@pytest.mark.parametrize("members", [(0, 1), (0, 1, 2)])
def test_a_difference_ends_the_run_although_the_member_that_found_it_dies_before_its_report(
    stage: Stage, members: tuple[int, ...]
) -> None:
    """Else the survivors would finish the step, and new witnesses would copy the state as it is."""
    victim = members[-1]
    script = Script(SHARDS, members, (Death(victim, 3, "with a difference found"),), recheck=ALL)
    outcomes = stage.outcomes(DYING, "train", [{"worker": worker, "script": script} for worker in members])
    errors = [outcomes[survivor].error for survivor in members[:-1]]
    assert all(errors), "nobody finishes"
    found = [error for error in errors if "ResultsDiffer" in error]  # the stage may kill the other survivor then
    assert found
    assert f"worker {victim} on this host" in found[0]
    assert "from step 3" in found[0]
    assert "The last good step is 2" in found[0]


def test_a_step_that_was_finished_with_the_sums_of_a_dead_member_is_not_called_good(stage: Stage) -> None:
    """Step 3 was compared by members of whom one has died: nobody who is left knows that."""
    deaths = Death(2, 3, "when all have arrived"), Death(1, 4, "with a difference found")
    script = Script(SHARDS, (0, 1, 2), deaths, recheck=ALL)
    outcomes = stage.outcomes(DYING, "train", [{"worker": worker, "script": script} for worker in (0, 1, 2)])
    assert "from step 4" in outcomes[0].error
    assert "Its members have rechecked no step before it together" in outcomes[0].error


@pytest.mark.parametrize(
    "point", ["in a recheck", "after the comparison", "with its copy updated", "when all copies agree"]
)
def test_over_gloo_a_death_in_a_recheck_changes_no_bit(
    stage: Stage, port: int, undisturbed: Survived, point: str
) -> None:
    script = Script(SHARDS, (0, 1, 2), (Death(1, 3, point),), {3: 2}, port, f"deaths {next(_names)} ", recheck=ALL)
    outcomes = stage.outcomes(DYING, "train", [{"worker": worker, "script": script} for worker in range(4)])
    assert not [one.error for one in outcomes if one.error]
    assert all(one.value.sha256 == undisturbed.sha256 for worker, one in enumerate(outcomes) if worker != 1)
