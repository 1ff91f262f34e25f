"""Which state a new generation goes on with. Pure: what members tell goes in, a choice comes out."""

from __future__ import annotations

from typing import Any

from distbelief.checkpoint.rules.boxes import Box
from distbelief.strategies.base import Applied
from distbelief.strategies.mesh.rules.agreement import CommitDecision, StateReport, choose, merged_history

SHAPES = {"w": (4,), "b": ()}
FIRST: dict[str, Box] = {"w": ((0, 2),)}
SECOND: dict[str, Box] = {"w": ((2, 4),), "b": ()}
ALL: dict[str, Box] = {"w": ((0, 4),), "b": ()}
THIRDS: list[dict[str, Box]] = [{"w": ((0, 1),), "b": ()}, {"w": ((1, 3),)}, {"w": ((3, 4),)}]


def verdict(step: int) -> CommitDecision:
    return CommitDecision(step, 0.5, 8, "", 1, 0.0, 0.125, 2)


def at(applied: int, boxes: dict[str, Box], pending: int = -1, **more: Any) -> StateReport:
    last = verdict(applied - 1) if applied else None
    return StateReport(applied, pending, **{"last": last, "boxes": boxes, "reached": applied, **more})


def holders(choice: Any) -> list[tuple[int, dict[str, Box]]]:
    return [(one.rank, dict(one.boxes)) for one in choice.holdings]


def test_survivors_who_have_everything_go_on_with_it() -> None:
    choice = choose([at(7, FIRST), at(7, SECOND), at(7, SECOND)], SHAPES)
    assert (choice.origin, choice.step, choice.reached) == ("members", 7, 7)
    assert holders(choice) == [(0, FIRST), (1, SECOND), (2, SECOND)]


def test_one_has_applied_the_step_and_the_others_catch_up() -> None:
    choice = choose([at(6, FIRST, pending=6), at(7, SECOND)], SHAPES)
    assert (choice.origin, choice.step) == ("members", 7)
    assert [one.rank for one in choice.holdings] == [0, 1]


def test_nobody_has_applied_the_step_and_it_is_done_again() -> None:
    choice = choose([at(6, FIRST, pending=6), at(6, SECOND, pending=6)], SHAPES)
    assert (choice.origin, choice.step) == ("members", 6)


def test_a_newcomer_has_nothing_to_give() -> None:
    choice = choose([StateReport(), at(3, ALL)], SHAPES)
    assert (choice.origin, choice.step, [one.rank for one in choice.holdings]) == ("members", 3, [1])


def test_an_initial_state_counts_as_well() -> None:
    assert choose([at(0, FIRST), at(0, SECOND)], SHAPES).origin == "members"


def test_a_lost_part_comes_from_the_newest_snapshots() -> None:
    positions = [
        at(9, FIRST, snapshots=[(6, FIRST), (6, SECOND)]),
        at(9, {}, snapshots=[(4, SECOND), (4, FIRST)]),
    ]
    choice = choose(positions, SHAPES)
    assert (choice.origin, choice.step, choice.reached) == ("snapshots", 6, 9)
    assert holders(choice) == [(0, FIRST), (0, SECOND)]


def test_reached_is_what_anybody_knows_of() -> None:
    positions = [StateReport(snapshots=[(4, ALL)], reached=4), StateReport(applied=5, boxes=FIRST, reached=11)]
    choice = choose(positions, SHAPES)
    assert (choice.origin, choice.step, choice.reached) == ("snapshots", 4, 11)


def test_a_death_while_a_snapshot_was_taken_leaves_the_older_one() -> None:
    """Rank 0 and 1 kept the parts of 8, but the dead member's neighbour did not get that far."""
    positions = [
        at(8, THIRDS[0], snapshots=[(4, THIRDS[0]), (4, THIRDS[2]), (8, THIRDS[0])]),
        at(8, THIRDS[1], snapshots=[(4, THIRDS[1]), (4, THIRDS[0]), (8, THIRDS[1]), (8, THIRDS[0])]),
    ]
    choice = choose(positions, SHAPES)
    assert (choice.origin, choice.step) == ("snapshots", 4)
    assert [one.rank for one in choice.holdings] == [0, 0, 1, 1]


def test_nothing_that_is_whole_means_outside() -> None:
    positions = [at(8, FIRST, snapshots=[(4, FIRST)]), StateReport(snapshots=[(3, SECOND)], reached=3)]
    choice = choose(positions, SHAPES)
    assert (choice.origin, choice.step, choice.reached, list(choice.holdings)) == ("outside", 0, 8, [])
    assert choose([StateReport(), StateReport()], SHAPES).origin == "outside"


def test_parts_of_an_old_and_a_new_plan_are_not_counted_twice() -> None:
    """Half and a third are not the whole, although the sum of what is held is larger than it."""
    positions = [at(5, {"w": ((0, 3),), "b": ()}), at(5, {"w": ((0, 2),)}), at(5, {"w": ((1, 3),)})]
    assert choose(positions, SHAPES).origin == "outside"
    assert choose([*positions, at(5, {"w": ((2, 4),)})], SHAPES).origin == "members"


def test_a_spare_with_a_later_state_that_was_given_up_does_not_hide_the_members() -> None:
    """A run went back from 10 to 8 while the spare looked on, and is at 9 now."""
    choice = choose([at(9, FIRST), at(9, SECOND), at(10, FIRST)], SHAPES)
    assert (choice.origin, choice.step) == ("members", 9)
    assert [one.rank for one in choice.holdings] == [0, 1]


def test_newer_snapshots_go_before_an_old_state_that_is_whole() -> None:
    """Two spares have stood by since step 3; of those who trained on, only one is left."""
    positions = [at(3, ALL), at(9, FIRST, snapshots=[(8, FIRST), (8, SECOND)])]
    choice = choose(positions, SHAPES)
    assert (choice.origin, choice.step) == ("snapshots", 8)


def test_nobody_catches_up_where_no_verdict_is_known() -> None:
    """Who has the state of 7 from a checkpoint knows of no vote on step 6."""
    positions = [at(6, FIRST, pending=6), at(7, ALL, last=None)]
    choice = choose(positions, SHAPES)
    assert (choice.step, [one.rank for one in choice.holdings]) == (7, [1])


def test_history_is_put_together_from_all_and_ends_with_the_state() -> None:
    def steps(*numbers: int) -> list[Applied]:
        return [Applied(number, float(number), 8, "", 1, 0.0) for number in numbers]

    positions = [
        StateReport(history=steps(2, 3)),
        StateReport(history=steps(0, 1, 2)),
        StateReport(history=steps(3, 4, 5)),
    ]
    assert merged_history(positions, 5) == steps(0, 1, 2, 3, 4)
