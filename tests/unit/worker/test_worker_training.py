"""The training loop: what it tells the coordinator again, and what it does with the state that it finds."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distbelief.options import SavePlan
from distbelief.strategies.base import Applied, StepResult, Takeover
from distbelief.worker.link import Progress
from distbelief.worker.training import Assignment, GenerationTraining, Stopwatch, is_save_due, train

KEPT = [Applied(step, 1.0, 8, f"print {step}", 2, 0.0) for step in range(3)]


def replica_at(applied: int, **more: Any) -> Any:
    """What the loop needs of one that has so many steps behind it."""
    return SimpleNamespace(
        exchange=SimpleNamespace(rank=0),
        comm_s=0.0,
        steps_applied=lambda: applied,
        taken_over=lambda: None,
        remembered=lambda first: KEPT[first:applied],
        note=lambda: (-1, b""),
        plan_lines=tuple,
        save_weights=lambda path: None,
        weights_sha256=lambda: "hash",
        waits=dict,
        traffic=lambda: (0, 0),
        helped=lambda: 0,
        compute=lambda step: None,
        commit=lambda step: StepResult(1.0, 8, f"print {step}"),
        **more,
    )


def watch() -> Stopwatch:
    return Stopwatch(SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize(("reported", "again"), [(3, []), (1, [1, 2]), (7, [0, 1, 2])])
def test_a_leader_reports_again_what_may_not_have_been_heard(tmp_path: Path, reported: int, again: list[int]) -> None:
    """7 of 3 steps: the coordinator had not heard that members went back when it began the generation."""
    task, progress = Assignment(0, 3, len(KEPT), tmp_path, reported, sealed=len(KEPT)), Progress()
    replica = replica_at(len(KEPT))
    train(replica, GenerationTraining(SimpleNamespace(), replica, None, watch(), progress, task))  # type: ignore[arg-type]
    assert [report.step for report in progress.reports] == again


@pytest.mark.parametrize("in_part", [False, True])
def test_in_the_middle_of_a_step_nothing_is_saved_or_evaluated(tmp_path: Path, in_part: bool) -> None:
    """Three steps are applied whole, the fourth in part: the state after three is gone, that after four not there."""
    saved, missed, evaluated = [], [], []
    saver = SimpleNamespace(
        plan=SavePlan("checkpoints", every_steps=1),
        asked=-1,
        take=lambda _, applied, *__, **___: saved.append(applied),
        miss=missed.append,
    )
    replica = replica_at(3)
    replica.taken_over = lambda: Takeover(3, 0, in_part)
    replica.exchange.gather = lambda payload: [payload]
    replica.keep_note = lambda content: None
    evaluator = SimpleNamespace(evaluate=lambda _: evaluated.append(1) or {})
    task = Assignment(0, 3, 4, tmp_path, 3, saver=saver)  # type: ignore[arg-type]
    job = SimpleNamespace(evaluate_every=1)
    train(replica, GenerationTraining(job, replica, evaluator, watch(), Progress(), task))  # type: ignore[arg-type]
    assert (saved, missed, len(evaluated)) == (([4], [3], 1) if in_part else ([3, 4], [], 2))


@pytest.mark.parametrize("fails", [True, False])
def test_a_failing_evaluation_is_not_blamed_on_the_shard_that_was_fetched_ahead(tmp_path: Path, fails: bool) -> None:
    replica, seen = replica_at(0), watch()
    replica.keep_note = lambda content: None

    def evaluate(_: Any) -> dict[str, float]:
        assert seen.shard == -1
        if fails:
            raise ValueError("boom in a metric")
        return {}

    evaluator = SimpleNamespace(evaluate=evaluate)
    task = Assignment(0, 3, 4, tmp_path, 3)
    training = GenerationTraining(SimpleNamespace(), replica, evaluator, seen, Progress(), task)  # type: ignore[arg-type]
    seen.step, seen.shard = 3, 2
    with pytest.raises(ValueError, match="boom") if fails else contextlib.nullcontext():
        training.evaluate(3)
    assert (seen.step, seen.shard) == (3, -1 if fails else 2)


@pytest.mark.parametrize(
    ("every", "asked", "due"),
    [(4, -1, [4, 8, 10]), (4, 7, [4, 7, 8, 10]), (0, -1, [10]), (0, 3, [3, 10]), (20, -1, [10])],
)
def test_every_nth_state_the_last_one_and_the_one_that_was_asked_for_are_saved(
    every: int, asked: int, due: list[int]
) -> None:
    plan = SavePlan("checkpoints", every_steps=every)
    assert [step for step in range(1, 11) if is_save_due(plan, asked, step, 10, step - 1)] == due


def test_where_several_steps_are_committed_together_the_first_state_after_it_was_due_is_saved() -> None:
    plan, states = SavePlan("checkpoints", every_steps=4), [3, 6, 9, 12, 15, 17]
    due = [now for now, before in zip(states, [0, *states], strict=False) if is_save_due(plan, -1, now, 17, before)]
    assert due == [6, 9, 12, 17]


def test_the_loop_asks_with_its_own_stride_and_the_saver_s_own_wish(tmp_path: Path) -> None:
    saver = SimpleNamespace(plan=SavePlan("checkpoints", every_steps=4), asked=-1)

    def due(saver: Any) -> list[int]:
        task = Assignment(0, 1, 17, tmp_path, 0, saver=saver, stride=3)
        training = GenerationTraining(SimpleNamespace(), replica_at(0), None, watch(), Progress(), task)  # type: ignore[arg-type]
        return [applied for applied in (3, 6, 9, 12, 15, 17) if training.is_save_due(applied)]

    assert due(saver) == [6, 9, 12, 17]
    saver.asked = 3
    assert due(saver) == [3, 6, 9, 12, 17]
    assert due(None) == []
