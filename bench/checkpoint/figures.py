"""What saves cost, from the times of steps and saves. Pure; the same arithmetic for everybody who is measured.

A save that holds k steps lies between the commit of step k - 1 and that of step k (steps count from 0).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.spreads import Ratio, Spread, ratio, spread


class NotMeasurable(Exception):
    """The times do not say what a save costs; the message tells why."""


@dataclass(frozen=True)
class Save:
    step: int
    """Steps that are in it."""
    stall_s: float
    """How long training was blocked, by the clock of who saved."""
    done_at: float
    """When the checkpoint was whole on disk."""
    size_bytes: int
    without_sync_s: float | None = None
    """The stall without waiting for the disk, where that was told apart."""


@dataclass(frozen=True)
class Trace:
    """What one process, or run, did."""

    commits: list[float]
    """When each step was done, all on one clock. What the benchmark itself does in between is not on it."""
    saves: list[Save]


@dataclass(frozen=True)
class Costs:
    step_s: float
    """The median of steps that no save disturbed."""
    stall_s: list[float] = field(default_factory=list)
    seen_s: list[float] = field(default_factory=list)
    """The step with the save less a quiet one: the stall as it is seen from outside, and noisier."""
    extra_s: list[float] = field(default_factory=list)
    """What each save cost in all: from it to the next one, less what as many quiet steps take."""
    write_s: list[float] = field(default_factory=list)
    """From the last commit before each save to when it was whole."""
    without_sync_s: list[float] = field(default_factory=list)
    size_bytes: int = 0


def costs(trace: Trace, every: int, warm_up: int) -> Costs:
    """What the saves after the first `warm_up` ones cost.

    >>> commits = [0, 1, 2, 5, 7, 8, 9, 12, 14, 15, 16]
    >>> costs(Trace(commits, [Save(3, 1.9, 6.5, 100), Save(7, 1.9, 13.5, 100)]), every=4, warm_up=1)
    Costs(step_s=1.0, stall_s=[1.9], seen_s=[2.0], extra_s=[3.0], write_s=[4.5], without_sync_s=[], size_bytes=100)
    """
    saves = trace.saves[warm_up:]
    if not saves:
        raise NotMeasurable(f"{len(trace.saves)} saves were taken, {warm_up} of them to warm up")
    steps = [save.step for save in saves]
    if any(later - earlier != every for earlier, later in itertools.pairwise(steps)):
        raise NotMeasurable(f"a save was left out: they hold {', '.join(map(str, steps))} steps, not every {every}")
    if len(trace.commits) < steps[-1] + every:
        raise NotMeasurable(f"{len(trace.commits)} steps were done, too few after the save of step {steps[-1]}")
    for save in saves:
        if save.done_at > trace.commits[save.step + every - 2]:
            raise NotMeasurable(
                f"the save of step {save.step} was still being written {every - 1} steps later, so that no quiet step "
                "is left; leave more steps between two saves (--every)"
            )
    quiet = _quiet_s(trace, saves[0].step)
    return Costs(
        step_s=quiet,
        stall_s=[save.stall_s for save in saves],
        seen_s=[trace.commits[step] - trace.commits[step - 1] - quiet for step in steps],
        extra_s=[trace.commits[step + every - 1] - trace.commits[step - 1] - every * quiet for step in steps],
        write_s=[save.done_at - trace.commits[save.step - 1] for save in saves],
        without_sync_s=[save.without_sync_s for save in saves if save.without_sync_s is not None],
        size_bytes=saves[-1].size_bytes,
    )


def _quiet_s(trace: Trace, first: int) -> float:
    """The median step, after `first` steps, during which nothing was saved or written."""
    windows = [(trace.commits[save.step - 1], save.done_at) for save in trace.saves]

    def is_quiet(begin: float, end: float) -> bool:
        return all(end <= opened or begin >= closed for opened, closed in windows)

    times = itertools.pairwise(trace.commits[first - 1 :])
    return statistics.median(end - begin for begin, end in times if is_quiet(begin, end))


def pooled(runs: Sequence[Costs], what: str) -> Spread:
    """One figure of all saves of all repetitions."""
    return spread([value for run in runs for value in getattr(run, what)])


def ratio_of_medians(what: str, ours: Sequence[Costs], theirs: Sequence[Costs], of: str) -> Ratio:
    """Taken per repetition, between the medians of its saves."""

    def medians(runs: Sequence[Costs], name: str) -> list[float]:
        return [statistics.median(getattr(run, name)) for run in runs]

    return ratio(what, medians(ours, "stall_s" if of == "without_sync_s" else of), medians(theirs, of))
