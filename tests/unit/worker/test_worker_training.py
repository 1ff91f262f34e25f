"""The training loop, where there is nothing left to train: what it tells the coordinator again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from distbelief.strategies.base import Applied
from distbelief.worker.link import Progress
from distbelief.worker.training import Assignment, Stopwatch, train

KEPT = [Applied(step, 1.0, 8, f"print {step}", 2, 0.0) for step in range(3)]


@pytest.mark.parametrize(("reported", "again"), [(3, []), (1, [1, 2]), (7, [0, 1, 2])])
def test_a_leader_reports_again_what_may_not_have_been_heard(tmp_path: Path, reported: int, again: list[int]) -> None:
    """7 of 3 steps: the coordinator had not heard that members went back when it began the generation."""
    replica = SimpleNamespace(
        exchange=SimpleNamespace(rank=0),
        steps_applied=lambda: len(KEPT),
        remembered=lambda first: KEPT[first:],
        note=lambda: (-1, b""),
        plan_lines=tuple,
        save_weights=lambda path: None,
        weights_sha256=lambda: "hash",
        traffic=lambda: (0, 0),
    )
    task = Assignment(0, 3, len(KEPT), tmp_path, reported, sealed=len(KEPT))
    progress, watch = Progress(), Stopwatch(SimpleNamespace())  # type: ignore[arg-type]
    train(SimpleNamespace(), replica, None, watch, progress, task)  # type: ignore[arg-type]
    assert [report.step for report in progress.reports] == again
