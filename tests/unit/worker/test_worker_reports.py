"""What members report again, what a checkpoint keeps of the last steps, and what follows from a failed write."""

from __future__ import annotations

from collections.abc import Sequence

from distbelief.strategies.base import Applied
from distbelief.worker.rules.reports import HEARD_AFTER_S, first_to_repeat, report_of, unheard
from distbelief.worker.rules.writing import (
    LAST_TRIES,
    LONGEST_RETRY_S,
    LOOKING_S,
    RETRY_S,
    AfterFailure,
    Attempts,
    after_failure,
)


def applied(step: int, at: float, generation: int = 1) -> Applied:
    return Applied(step, 0.5, 8, f"{step:016x}", generation, at)


def steps(kept: Sequence[Applied]) -> list[int]:
    return [one.step for one in kept]


def test_a_report_names_the_generation_in_which_the_step_was_applied() -> None:
    report = report_of(applied(3, 100.0, generation=2))
    assert (report.step, report.generation, report.at) == (3, 2, 100.0)


def test_after_a_rollback_all_steps_are_reported_again() -> None:
    assert first_to_repeat(reported=5, applied=9) == 5
    assert first_to_repeat(reported=9, applied=9) == 9
    assert first_to_repeat(reported=9, applied=5) == 0


def test_only_the_last_results_are_kept_and_always_the_last_one() -> None:
    history = [applied(step, 100.0 + step) for step in range(10)]
    assert steps(unheard(history)) == [8, 9]
    assert steps(unheard([applied(0, 0.0), applied(1, 100.0)])) == [1]
    assert steps(unheard([applied(0, 0.0)])) == [0]


def test_a_clock_that_was_set_loses_no_result() -> None:
    """The members that reported had other clocks, or the clock was set back in between."""
    hours = 3 * 3600.0
    ahead = [applied(0, 100.0), applied(1, 100.1 + hours, 2), applied(2, 100.2 + hours, 2)]
    behind = [applied(0, 100.0 + hours), applied(1, 100.1, 2), applied(2, 100.2, 2)]
    set_back = [applied(0, 100.0 + hours), applied(1, 100.1), applied(2, 100.2)]
    assert steps(unheard(ahead)) == steps(unheard(behind)) == steps(unheard(set_back)) == [0, 1, 2]
    old = [applied(0, 100.0, 2), applied(1, 100.0 + 2 * HEARD_AFTER_S, 2), *ahead[1:]]
    assert 0 not in steps(unheard(old))


# --- failed writes ---------------------------------------------------------------------------------------------------


def fail(times: int, exists: bool = False, newest: tuple[int, int] = (1, 8), last: bool = False) -> AfterFailure:
    """The write of snapshot 1, of step 8, fails so often."""
    attempts = Attempts()
    for _ in range(times):
        found = after_failure(attempts, exists, 1, 8, newest, last)
        attempts = found.attempts
    return found


def test_pauses_between_attempts_grow_to_a_limit() -> None:
    assert [fail(times).pause_s for times in (1, 2, 3)] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S]
    assert fail(2, exists=True).pause_s == 2 * LOOKING_S
    assert fail(5000).pause_s == LONGEST_RETRY_S
    assert not fail(5000).over


def test_a_newer_snapshot_replaces_one_that_cannot_be_written() -> None:
    assert fail(1, newest=(2, 12)) == AfterFailure(Attempts(failed=1), over=True, gave_up=True, pause_s=RETRY_S)


def test_a_snapshot_of_the_same_step_by_another_generation_gives_nothing_up() -> None:
    assert fail(1, newest=(2, 8)) == AfterFailure(Attempts(failed=1), over=True, gave_up=False, pause_s=RETRY_S)


def test_the_last_snapshot_is_given_up_after_some_attempts_but_not_while_another_checkpoint_is_looked_at() -> None:
    assert not fail(LAST_TRIES - 1, last=True).over
    assert fail(LAST_TRIES, last=True).gave_up
    assert not fail(LAST_TRIES + 1, exists=True, last=True).over
