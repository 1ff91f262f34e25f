"""Every schedule, played through without computing anything: who waits for whom, and that nobody does so forever."""

from __future__ import annotations

from collections import Counter

import pytest

from distbelief.strategies.mesh.rules.schedules import (
    SCHEDULES,
    Action,
    PipelineSchedule,
    member_of,
    stage_count,
    stages_of,
)
from distbelief.strategies.mesh.run.runner import actions_of

SIZES = range(1, 6)
SHARDS = range(18)


def play(schedule: PipelineSchedule, members: int, shards: int) -> list[tuple[int, Action]]:
    """(member, action) as they come to pass. Sends do not wait, so a member is held up by what it has not got only."""
    last = stage_count(schedule, members) - 1
    orders = [list(actions_of(schedule, members, member, shards)) for member in range(members)]
    done: set[tuple[str, int, int]] = set()
    happened: list[tuple[int, Action]] = []

    def may(action: Action) -> bool:
        stage, shard = action.stage, action.shard
        if action.kind == "forward":
            return stage == 0 or ("forward", stage - 1, shard) in done
        if action.kind == "backward_weight":
            return ("backward_input", stage, shard) in done
        return ("forward", stage, shard) in done and (stage == last or ("gradient", stage + 1, shard) in done)

    moved = True
    while moved:
        moved = False
        for member, left in enumerate(orders):
            while left and may(left[0]):
                action = left.pop(0)
                done.add((action.kind, action.stage, action.shard))
                if action.kind in ("backward", "backward_input"):
                    done.add(("gradient", action.stage, action.shard))
                happened.append((member, action))
                moved = True
    assert not any(orders), f"{schedule} of {members} with {shards} shards: all wait for each other"
    return happened


@pytest.mark.parametrize("members", SIZES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_does_every_shard_once_and_nobody_waits_forever(schedule: PipelineSchedule, members: int) -> None:
    stages = stage_count(schedule, members)
    for shards in SHARDS:
        happened = play(schedule, members, shards)
        for member, action in happened:
            assert action.stage in stages_of(schedule, members, member)
        count = Counter((a.kind, a.stage, a.shard) for _, a in happened)
        assert set(count.values()) <= {1}
        for stage in range(stages):
            for shard in range(shards):
                assert count["forward", stage, shard] == 1
                halves = count["backward_input", stage, shard], count["backward_weight", stage, shard]
                whole = count["backward", stage, shard]
                assert (whole, *halves) in ((1, 0, 0), (0, 1, 1))


@pytest.mark.parametrize("members", SIZES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_takes_shards_in_their_order(schedule: PipelineSchedule, members: int) -> None:
    """StageTransfer tell shapes ahead of the first shard of a size: both ends must agree on which one is the first."""
    for shards in SHARDS:
        for member in range(members):
            for stage in stages_of(schedule, members, member):
                for kinds in (("forward",), ("backward", "backward_input")):
                    mine = actions_of(schedule, members, member, shards)
                    assert [a.shard for a in mine if a.stage == stage and a.kind in kinds] == list(range(shards))


@pytest.mark.parametrize("members", [2, 4])
def test_zero_bubble_has_halves_and_the_others_have_none(members: int) -> None:
    """Where they do not follow each other: at the end, when there is nothing else left to do in between."""
    for schedule in SCHEDULES:
        kinds = {a.kind for member in range(members) for a in actions_of(schedule, members, member, 8)}
        assert ("backward_weight" in kinds) is (schedule == "zbv")


@pytest.mark.parametrize("members", SIZES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_has_one_member(schedule: PipelineSchedule, members: int) -> None:
    mine = [stages_of(schedule, members, member) for member in range(members)]
    assert sorted(stage for stages in mine for stage in stages) == list(range(stage_count(schedule, members)))
    for member, stages in enumerate(mine):
        assert all(member_of(schedule, members, stage) == member for stage in stages)


def test_the_v_of_zero_bubble_begins_and_ends_with_the_first_member() -> None:
    assert stages_of("zbv", 4, 0) == [0, 7]
    assert stages_of("zbv", 4, 3) == [3, 4]


@pytest.mark.parametrize("members", range(2, 6))
def test_1f1b_holds_no_more_shards_than_there_are_stages_after_it(members: int) -> None:
    """Activations of a shard are kept from its forward to its backward pass: gpipe keeps all of them."""
    for member in range(members):
        most = {schedule: _most_held(actions_of(schedule, members, member, 17)) for schedule in ("1f1b", "gpipe")}
        assert most == {"1f1b": members - member, "gpipe": 17}


def _most_held(actions: tuple[Action, ...]) -> int:
    held, most = 0, 0
    for action in actions:
        held += 1 if action.kind == "forward" else -1
        most = max(most, held)
    return most
