"""Whoever dies, and wherever in a step: the survivors take the step over and end with the bits of an undisturbed run.

Members are real processes that are really killed; see tests/support/replicas/dying.py.
"""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore

from tests.support.replicas.dying import POINTS, Death, Script, Survived
from tests.support.stage import Stage

MEMBER = "tests.support.replicas.dying"
SHARDS = 8
ARRIVED_BY = POINTS.index("after it arrived")
"""From here on, everything that the dying member has computed is published."""
APPLIED_BY = POINTS.index("with all tiles applied")

_names = itertools.count()
_undisturbed: dict[int, Survived] = {}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def play(stage: Stage, script: Script) -> list[Survived]:
    """What those that are left at the end have; the others must have died of their own SIGKILL."""
    members = [{"worker": worker, "script": script} for worker in script.workers]
    outcomes = dict(zip(script.workers, stage.outcomes(MEMBER, "train", members), strict=True))
    last = script.members(script.generations)
    errors = [outcome.error for outcome in outcomes.values() if outcome.error]
    assert not errors, "\n".join(errors)
    assert {outcomes[death.worker].status for death in script.deaths} <= {-signal.SIGKILL}
    return [outcomes[worker].value for worker in last]


def same_as_undisturbed(stage: Stage, found: list[Survived], shards: int = SHARDS) -> None:
    if shards not in _undisturbed:
        [_undisturbed[shards]] = play(stage, Script(shards, (0,), ()))
    alone = _undisturbed[shards]
    assert found
    for one in found:
        assert one.sha256 == alone.sha256
        assert one.losses == alone.losses
        assert one.fingerprints == alone.fingerprints
        assert one.note == (3, b"after three")


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_at_any_point_of_a_step_changes_no_bit(stage: Stage, point: str, victim: int) -> None:
    """In step 3, of three members; step 2 is a short one, so 3 is the first of an epoch."""
    script = Script(SHARDS, (0, 1, 2), (Death(victim, 3, point),))
    found = play(stage, script)
    same_as_undisturbed(stage, found)
    assert found[0].takeovers == found[1].takeovers, "all members see the same"
    takeover = found[0].takeovers.get(2)
    if POINTS.index(point) >= APPLIED_BY:
        assert takeover is None or takeover[0] == 4, "a step that is wholly applied is not undone"
    else:
        assert takeover is not None
        assert takeover[0] == 3
    if ARRIVED_BY <= POINTS.index(point) < APPLIED_BY:
        assert takeover == (3, 0), "what the dead one has published is used"
    elif takeover is not None and takeover[0] == 3:  # of step 4 the survivors may have computed nothing yet
        first, end = script.ranges(1)[victim]
        assert takeover[1] <= end - first, "the survivors' own shards are not computed again"


def test_what_the_dead_one_was_computing_is_known_and_only_that(stage: Stage) -> None:
    found = play(stage, Script(SHARDS, (0, 1, 2), (Death(1, 3, "in a shard"),)))
    assert found[0].broken[1] == []
    first = 1 * SHARDS // 3
    assert found[0].broken[2] == [(1, 3, first + 1)], "it died in its second shard"
    found = play(stage, Script(SHARDS, (0, 1, 2), (Death(1, 3, "after it arrived"),)))
    assert found[0].broken[2] == []


PAIRS = [
    ("in a shard", "in a shard"),
    ("after some tiles", "before it arrives"),
    ("after it arrived", "after it arrived"),
    ("with a tile torn", "with some tiles applied"),
    ("with some tiles applied", "before its shards"),
    ("when all have arrived", "with a tile torn"),
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("newcomer", [False, True])
def test_two_generations_lost_in_the_same_step(stage: Stage, first: str, second: str, newcomer: bool) -> None:
    deaths = (Death(1, 3, first), Death(0, 3, second))
    joins = {3: 2, 4: 3} if newcomer else {}
    script = Script(SHARDS, (0, 1, 2), deaths, joins)
    found = play(stage, script)
    same_as_undisturbed(stage, found)
    assert len(found) == (3 if newcomer else 1)
    takeover = found[0].takeovers.get(3)
    assert all(one.takeovers.get(3) == takeover for one in found)
    if (first, second) == ("with a tile torn", "with some tiles applied"):
        assert takeover is None or takeover[0] == 4, "the one tile that was missing was the other one's"
    elif POINTS.index(first) >= ARRIVED_BY:
        assert takeover == (3, 0), "what the first generation published serves the third"


def test_four_generations_lost_in_the_same_step_and_newcomers_for_all(stage: Stage) -> None:
    points = ["in a shard", "after it arrived", "after some tiles", "with some tiles applied"]
    deaths = tuple(Death(worker, 2, point) for worker, point in enumerate(points))
    joins = {3: 2, 4: 3, 5: 4, 6: 5}
    found = play(stage, Script(7, (0, 1, 2), deaths, joins))
    same_as_undisturbed(stage, found, shards=7)


@pytest.mark.parametrize("step", [0, 2, 5])
def test_a_death_in_the_first_step_in_a_short_one_and_in_the_last(stage: Stage, step: int) -> None:
    """Step 2 has samples for some shards only, so some members have nothing to compute."""
    for point in ("in a shard", "with a tile torn"):
        found = play(stage, Script(SHARDS, (0, 1, 2), (Death(1, step, point),)))
        same_as_undisturbed(stage, found)


def test_the_last_member_dies_and_a_newcomer_finishes_alone(stage: Stage) -> None:
    deaths = (Death(0, 1, "in a shard"), Death(1, 3, "with some tiles applied"))
    found = play(stage, Script(SHARDS, (0, 1), deaths, {2: 3}))
    same_as_undisturbed(stage, found)


def test_a_step_that_is_certain_is_finished_however_often_its_members_die(stage: Stage) -> None:
    """Each of them updates some tiles, or tears one; what is added up is what the first ones computed."""
    points = ["with a tile torn", *["when all have arrived"] * 6]
    deaths = tuple(Death(worker, 3, point) for worker, point in enumerate(points))
    found = play(stage, Script(SHARDS, (0, 1, 2), deaths, {worker: worker - 1 for worker in range(3, 9)}))
    same_as_undisturbed(stage, found)
    assert all(set(one.takeovers.values()) == {(3, 0)} for one in found)


@pytest.mark.parametrize("point", POINTS)
def test_where_bits_do_not_count_a_certain_step_is_finished_and_another_computed_again(
    stage: Stage, point: str
) -> None:
    found = play(stage, Script(SHARDS, (0, 1, 2), (Death(1, 3, point),), exact=False))
    assert len({one.sha256 for one in found}) == 1
    assert all(math.isfinite(loss) for loss in found[0].losses)
    takeover = found[0].takeovers.get(2)
    in_part = POINTS.index("with a tile torn") <= POINTS.index(point) < APPLIED_BY
    assert takeover == ((3, 0) if in_part else None)


# --- members that have a replica each --------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["in a shard", "before it arrives", "when all have arrived", "after it applied"])
def test_in_a_torch_group_the_survivors_and_a_newcomer_go_on_from_the_furthest_state(
    stage: Stage, port: int, point: str
) -> None:
    name = f"deaths {next(_names)} "
    script = Script(SHARDS, (0, 1, 2), (Death(1, 3, point),), {3: 2}, port, name)
    found = play(stage, script)
    assert len(found) == 3
    same_as_undisturbed(stage, found)


def test_in_a_torch_group_one_after_the_other_dies_and_is_replaced(stage: Stage, port: int) -> None:
    deaths = (Death(0, 1, "in a shard"), Death(1, 3, "in a shard"))
    script = Script(SHARDS, (0, 1, 2), deaths, {3: 2, 4: 3}, port, f"deaths {next(_names)} ")
    same_as_undisturbed(stage, play(stage, script))
