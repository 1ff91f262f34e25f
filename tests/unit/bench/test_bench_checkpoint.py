"""The arithmetic of the benchmark of checkpoints, by plain calls. (A whole run takes a minute, and measures nothing on
a busy machine: that is for people to start.)"""

from __future__ import annotations

from typing import Any

import pytest

from bench.checkpoint import figures


def a_trace(durations: list[float], saves: dict[int, tuple[float, float]]) -> Any:
    """`saves`: steps in it -> (stall, seconds from the commit before it until it is written)."""
    commits = [sum(durations[: step + 1]) for step in range(len(durations))]
    found = [
        figures.Save(step, stall_s, commits[step - 1] + write_s, 1000) for step, (stall_s, write_s) in saves.items()
    ]
    return figures.Trace(commits, found)


def test_what_a_save_costs_in_all() -> None:
    # Steps take 1 s; the one with the save 3 s, for a stall of 1.5 s; one more is slowed down to 1.5 s by the writing.
    cycle = [3.0, 1.5, 1.0, 1.0, 1.0]
    trace = a_trace([1.0] * 5 + cycle * 3, {5: (9.0, 4.0), 10: (1.5, 4.0), 15: (1.25, 4.0)})
    found = figures.costs(trace, every=5, warm_up=1)
    assert found.step_s == pytest.approx(1.0)
    assert found.stall_s == [1.5, 1.25]  # that of the first one is not in it
    assert found.seen_s == pytest.approx([2.0, 2.0])
    assert found.extra_s == pytest.approx([2.5, 2.5])
    assert found.write_s == pytest.approx([4.0, 4.0])
    assert found.size_bytes == 1000


@pytest.mark.parametrize(
    ("saves", "text"),
    [
        ({5: (1, 2)}, "1 saves were taken, 1 of them to warm up"),
        ({5: (1, 2), 10: (1, 2), 20: (1, 2)}, "a save was left out: they hold 10, 20 steps"),
        ({5: (1, 2), 10: (1, 4.5), 15: (1, 2)}, "save of step 10 was still being written 4 steps later"),
        ({15: (1, 2), 20: (1, 2)}, "24 steps were done, too few after the save of step 20"),
    ],
)
def test_what_cannot_be_told_apart_is_no_figure(saves: Any, text: str) -> None:
    with pytest.raises(figures.NotMeasurable, match=text):
        figures.costs(a_trace([1.0] * 24, saves), every=5, warm_up=1)


def test_ratios_are_taken_within_a_repetition() -> None:
    ours = [figures.Costs(1.0, [0.1, 0.3, 0.2]), figures.Costs(1.0, [1.0, 1.0, 1.0])]
    theirs = [
        figures.Costs(1.0, [2.0, 2.0, 9.0], without_sync_s=[1.0, 1.0, 1.0]),
        figures.Costs(1.0, [4.0, 4.0, 0.0], without_sync_s=[2.0, 2.0, 2.0]),
    ]
    assert figures.ratio_of_medians("", ours, theirs, "stall_s").spread.values == pytest.approx([0.1, 0.25])
    assert figures.ratio_of_medians("", ours, theirs, "without_sync_s").spread.values == pytest.approx([0.2, 0.5])
    assert figures.pooled(ours, "stall_s").values == [0.1, 0.3, 0.2, 1.0, 1.0, 1.0]
