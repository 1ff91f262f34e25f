"""When faults come due."""

from __future__ import annotations

from distbelief.chaos.rules.schedule import Fault, Pending, begin, due, never_due, parse


def play(text: str, *looks: tuple[int, float]) -> tuple[list[list[str]], tuple[Pending, ...]]:
    pending = begin(parse(text))
    came: list[list[str]] = []
    for step, elapsed_s in looks:
        found: list[Fault]
        pending, found = due(pending, step, elapsed_s)
        came.append([fault.kind for fault in found])
    return came, pending


def test_a_fault_without_a_time_comes_at_once_and_once() -> None:
    assert play("slow worker 1 by 3x", (0, 0.0), (1, 1.0))[0] == [["slow worker"], []]


def test_at_a_step_and_at_a_time() -> None:
    came, _ = play("join at step 4, kill worker at 3s", (3, 2.9), (9, 2.95), (9, 3.0), (20, 9.0))
    assert came == [[], ["join"], ["kill worker"], []]


def test_repeats_that_were_leapt_over_come_once() -> None:
    came, _ = play("kill worker every 10 steps", (9, 0.0), (10, 0.1), (19, 0.2), (47, 0.3), (49, 0.4), (50, 0.5))
    assert [len(found) for found in came] == [0, 1, 0, 1, 0, 1]
    came, _ = play("kill worker every 3s", (0, 0.0), (0, 2.9), (0, 3.0), (0, 3.1), (0, 20.0), (0, 20.9), (0, 21.0))
    assert [len(found) for found in came] == [0, 0, 1, 0, 1, 0, 1]


def test_what_never_came() -> None:
    _, pending = play("join at step 4, kill worker every 3s, scale to 2 at step 90", (4, 3.5))
    assert [str(fault) for fault in never_due(pending)] == ["scale to 2 at step 90"]
