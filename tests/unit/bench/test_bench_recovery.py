"""The arithmetic of the benchmark of recovery, by plain calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bench.recovery import figures


def every_tenth(generation: int, steps: Sequence[int], begin: float) -> list[Any]:
    return [figures.Commit(step, begin + 0.1 * i, generation) for i, step in enumerate(steps)]


def test_a_step_that_survivors_finish_without_the_victim_is_no_recovery() -> None:
    commits = every_tenth(1, range(10), 0.0)  # the last at 0.9
    commits += every_tenth(2, [10, 11], 1.2) + every_tenth(3, range(12, 20), 1.4)
    members = {1: [7, 8, 9], 2: [8, 9], 3: [8, 9, 10]}
    observed = figures.Observed(
        3, [figures.Kill(7, 0.85)], commits, members, {1: 0.0, 2: 0.88, 3: 1.35}, {2: 3}, shard_s=0.02
    )
    (episode,) = figures.episodes(observed)
    assert episode.next_commit_s == pytest.approx(0.35)
    assert episode.decided_s == pytest.approx(0.03)
    assert episode.redone_steps == 0
    assert episode.recomputed_shards == 3
    # 0.35 less the 0.15 that steps 9 and 10 needed anyway, less two rounds of shards for two survivors
    assert episode.overhead_s == pytest.approx(0.35 - 0.15 - 0.04)
    assert episode.lost_steps == pytest.approx(2.0)
    assert episode.lost_until_whole_steps == pytest.approx(2.0)


def test_steps_done_again_from_a_checkpoint_are_not_the_next_step() -> None:
    commits = every_tenth(1, range(10), 0.0) + every_tenth(2, range(5, 20), 3.0)
    observed = figures.Observed(2, [figures.Kill(1, 0.95)], commits, {1: [1, 2], 2: [3, 4]})
    (episode,) = figures.episodes(observed)
    assert episode.redone_steps == 5
    assert episode.next_commit_s == pytest.approx(3.5 - 0.95)
    assert episode.lost_steps == pytest.approx(25.0)
    assert episode.overhead_s is None


def test_no_new_step_is_an_error_and_not_a_figure() -> None:
    commits = every_tenth(1, range(10), 0.0) + every_tenth(2, range(5, 8), 3.0)
    observed = figures.Observed(2, [figures.Kill(1, 0.95)], commits, {1: [1, 2], 2: [3, 4]})
    with pytest.raises(figures.NotRecovered, match="no step beyond 9"):
        figures.episodes(observed)
