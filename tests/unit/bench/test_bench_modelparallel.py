"""The arithmetic of the benchmark of divided models, by plain calls."""

from __future__ import annotations

from typing import Any

import pytest

from bench.modelparallel import figures


def test_what_happens_in_some_steps_only_counts_in_the_mean_and_not_in_the_median() -> None:
    quick = figures.measured([0.0, 9.0, 10.0, 11.0, 12.0], 2, [3.0, 2.0], 0.0)
    with_a_pause = figures.measured([0.0, 9.0, 10.0, 13.0, 14.0], 2, [3.0, 2.0], 0.0)
    of_all, of_median = figures.ratios([with_a_pause], [quick])
    assert of_all.ratio.spread.median == pytest.approx(5 / 3)
    assert of_all.verdict == "not met"
    assert of_median.ratio.spread.median == pytest.approx(1.0)


def test_another_loss_is_a_problem() -> None:
    def run_of(*losses: float) -> Any:
        return figures.measured([0.0, 1.0, 2.0], 1, losses, 0.0)

    assert figures.loss_problems([run_of(2.0, 1.5, 1.0)], [run_of(2.0, 1.4, 1.01)]) == []
    (problem,) = figures.loss_problems([run_of(2.0, 1.5, 1.0)], [run_of(2.01, 1.5, 1.0)])
    assert "first step" in problem
    (problem,) = figures.loss_problems([run_of(2.0, 1.5, 1.0)], [run_of(2.0, 1.0)])
    assert "3 steps, they 2" in problem
    assert figures.loss_problems([run_of(2.0, 2.0)], [run_of(2.0, 2.0)]) == [
        "our loss went from 2.0000 to 2.0000",
        "their loss went from 2.0000 to 2.0000",
    ]
