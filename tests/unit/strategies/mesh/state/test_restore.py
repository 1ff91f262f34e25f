"""Generation after generation with other degrees, with real members over gloo: where the state comes from, and that a
run ends like one that nothing disturbed."""

from __future__ import annotations

from typing import Any

import pytest

from distbelief.strategies.rules.degrees import Degrees
from tests.support.mesh.following import check, follow, put_together
from tests.support.mesh.member import Generation, Script
from tests.support.stage import Stage

PP2, TP2, DP2, FSDP2 = Degrees(pipeline=2), Degrees(tensor=2), Degrees(data=2), Degrees(sharded=2)
PP3, FSDP3, DP2_PP2, ONE = Degrees(pipeline=3), Degrees(sharded=3), Degrees(data=2, pipeline=2), Degrees()

SCRIPTS = {
    "other layouts": Script(
        "adam",
        "pipeline:2:snapshots=0",
        (
            Generation(PP2, (0, 1), 2),
            Generation(FSDP2, (1, 0), 4),
            Generation(TP2, (0, 1), 6),
            Generation(DP2, (0, 1), 8),
            Generation(FSDP3, (2, 1, 0), 10),
        ),
    ),
    "a part is lost": Script(
        "adam",
        "pipeline:3:snapshots=2",
        (
            Generation(PP3, (0, 1, 2), 5),
            Generation(FSDP2, (0, 2), 7),
            Generation(PP3, (3, 2, 0), 8),
            Generation(ONE, (2,), 9),
        ),
    ),
    "a pipeline is left": Script(
        "cnn",
        "dp2.pp2:snapshots=0",
        (Generation(DP2_PP2, (0, 1, 2, 3), 2), Generation(PP2, (1, 2), 4)),
    ),
    "called away in the vote": Script(
        "adam",
        "pipeline:2:snapshots=0",
        (Generation(PP2, (0, 1), 3, called_away=(1,)), Generation(TP2, (1, 0), 6)),
    ),
    "all called away in the vote": Script(
        "adam",
        "sharded:snapshots=0",
        (Generation(FSDP2, (0, 1), 3, called_away=(0, 1)), Generation(PP2, (0, 1), 6)),
    ),
    "a spare with a later state": Script(
        "adam",
        "sharded:snapshots=2",
        (Generation(FSDP3, (0, 1, 2), 5), Generation(FSDP2, (0, 2), 4), Generation(FSDP3, (0, 1, 2), 6)),
    ),
    "nobody has it": Script(
        "adam",
        "pipeline:3:snapshots=2",
        (Generation(PP3, (0, 1, 2), 3), Generation(FSDP2, (0, 3), 4)),
    ),
}


@pytest.fixture(scope="module")
def followed(stage: Stage) -> dict[str, list[list[Any]]]:
    """All of them in one go: members are started once."""
    return dict(zip(SCRIPTS, follow(stage, list(SCRIPTS.values())), strict=True))


def beginnings(generations: list[list[Any]]) -> list[int]:
    for held in generations:
        assert len({one.began_at for one in held}) == 1
    return [held[0].began_at for held in generations]


def test_state_goes_from_layout_to_layout(followed: dict[str, list[list[Any]]]) -> None:
    generations = followed["other layouts"]
    assert beginnings(generations) == [0, 2, 4, 6, 8]
    assert all(one.rolled_back is None for held in generations for one in held)
    for held, generation in zip(generations, SCRIPTS["other layouts"].generations, strict=True):
        check("adam", held, generation.until)
        state = put_together(held)
        assert all(float(state[name]) == generation.until for name in state if name.startswith("optimizer/step/"))
    shares = [{name for name in one.pieces if name.startswith("optimizer/exp_avg/")} for one in generations[0]]
    assert not shares[0] & shares[1], "each stage has the state of its own parameters"


def test_a_lost_part_comes_from_a_neighbours_snapshot(followed: dict[str, list[list[Any]]]) -> None:
    first, second, third, last = followed["a part is lost"]
    assert all(one.snapshots == [4, 4] for one in first)
    assert all(one.rolled_back == (5, 4, "snapshots") for one in second)
    assert all(one.snapshots == [6, 6] for one in second)
    check("adam", second, 7)
    assert all(one.rolled_back is None and one.began_at == 7 for one in third)
    check("adam", third, 8)
    # Two of three die: the one that is left has its own part, and that of the one before it.
    assert [one.rolled_back for one in last] == [(8, 0, "checkpoint")]
    check("adam", last, 9)


def test_what_another_pipeline_still_holds_is_not_lost(followed: dict[str, list[list[Any]]]) -> None:
    generations = followed["a pipeline is left"]
    assert beginnings(generations) == [0, 2]
    assert all(one.rolled_back is None for one in generations[1])
    check("cnn", generations[1], 4)


def test_who_was_called_away_inside_of_the_vote_applies_the_step_later(followed: dict[str, list[list[Any]]]) -> None:
    first, second = followed["called away in the vote"]
    assert [max(one.losses) for one in first] == [3, 2]
    assert all(one.began_at == 4 and one.rolled_back is None for one in second)
    check("adam", second, 6)


def test_a_step_that_nobody_has_applied_is_done_again(followed: dict[str, list[list[Any]]]) -> None:
    first, second = followed["all called away in the vote"]
    assert [max(one.losses) for one in first] == [2, 2]
    assert all(one.began_at == 3 and one.rolled_back is None for one in second)
    check("adam", second, 6)


def test_a_spare_whose_state_was_given_up_disturbs_nobody(followed: dict[str, list[list[Any]]]) -> None:
    generations = followed["a spare with a later state"]
    assert beginnings(generations) == [0, 4, 4]
    assert all(one.rolled_back == (5, 4, "snapshots") for one in generations[1])
    assert all(one.rolled_back is None for one in generations[2])
    check("adam", generations[2], 6)


def test_without_enough_snapshots_the_run_begins_anew(followed: dict[str, list[list[Any]]]) -> None:
    first, second = followed["nobody has it"]
    assert all(one.losses.keys() == {0, 1, 2} for one in first)
    assert all(one.rolled_back == (3, 0, "checkpoint") for one in second)
    check("adam", second, 4)
