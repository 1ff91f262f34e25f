"""From what was seen of a run under kills to figures. Pure: it opens no file and has no clock.

A *generation* is one membership: ours has it in its journal; for torchrun and Ray Train it is one start of all
processes, for torchft one quorum. The killed process's generation is the newest one that it was a member of, so that a
step which the survivors could still finish without it is not taken for a recovery. Of one kill:

- `next_commit_s`: from SIGKILL to the first step that was committed by a later generation and had not been committed
  before. Steps that a peer does again from its checkpoint do not count as next; they are counted in `redone_steps`.
- `decided_s` (ours): from SIGKILL to the record of the next generation in the journal.
- `overhead_s` (ours): `next_commit_s` without the work that anybody would have had to do. That work is what was left of
  the step in flight (last commit + the median step - the kill, at least 0), and the shards computed again, spread
  evenly over the survivors, at the seconds per shard that the workers themselves measured in this run.
- `lost_steps`: from the last commit of the old generation to the next one, in median steps, less the steps committed
  in that time: what the kill cost until training went on, recomputed shards and redone steps included.
- `lost_until_whole_steps`: the same up to the `SETTLED`th new step of the first generation that has all workers again:
  the replacement's start and join, and the time with a worker less, count too. (Where there are more workers than
  cores, one worker less is not slower, so that this can be below `lost_steps`, even below 0.)
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SETTLED = 4


@dataclass(frozen=True)
class Commit:
    step: int
    at: float
    generation: int


@dataclass(frozen=True)
class Kill:
    pid: int
    at: float


@dataclass(frozen=True)
class Observed:
    """One run: every committed step in the order of time, and who was there."""

    workers: int
    kills: Sequence[Kill]
    commits: Sequence[Commit]
    members: Mapping[int, Sequence[int]]
    """Generation -> pids."""
    decided_at: Mapping[int, float] = field(default_factory=dict)
    """Generation -> when it was decided; empty where nobody says so."""
    recomputed: Mapping[int, int] = field(default_factory=dict)
    """Generation -> shards computed again; empty for a system without shards."""
    shard_s: float | None = None


@dataclass(frozen=True)
class Episode:
    """What one kill cost."""

    next_commit_s: float
    redone_steps: int
    lost_steps: float
    lost_until_whole_steps: float | None
    decided_s: float | None = None
    recomputed_shards: int | None = None
    overhead_s: float | None = None


class NotRecovered(Exception):
    """No new step was committed after a kill."""


def step_s(observed: Observed) -> float:
    """The median time of a step while all workers are there. The first of a generation is left out: it has the pause
    of the regroup in it."""
    seconds = []
    for _, group in itertools.groupby(_whole_commits(observed), key=lambda commit: commit.generation):
        found = list(group)
        seconds += [b.at - a.at for a, b in itertools.pairwise(found) if b.step == a.step + 1]
    if not seconds:
        raise NotRecovered("there were never two steps in a row with all workers")
    return statistics.median(seconds)


def _whole_commits(observed: Observed) -> list[Commit]:
    return [c for c in observed.commits if len(observed.members.get(c.generation, ())) == observed.workers]


def whole_again(
    workers: int, commits: Sequence[Commit], members: Mapping[int, Sequence[int]], *, after: int, beyond: int
) -> Commit | None:
    """The `SETTLED`th step beyond step `beyond` of the first generation after `after` that has all workers.

    >>> commits = [Commit(1, 0.1, 1), Commit(2, 0.4, 2), Commit(3, 0.5, 3), Commit(4, 0.6, 3)]
    >>> commits += [Commit(5, 0.7, 3), Commit(6, 0.8, 3)]
    >>> whole_again(2, commits, {1: [7, 8], 2: [8], 3: [8, 9]}, after=1, beyond=1)
    Commit(step=6, at=0.8, generation=3)
    """
    for generation in sorted(number for number in members if number > after and len(members[number]) == workers):
        # From the end: a caller that waits asks again and again, and what it waits for is there.
        tail = itertools.takewhile(lambda commit, oldest=generation: commit.generation >= oldest, reversed(commits))  # type: ignore[misc]
        new = [commit for commit in tail if commit.generation == generation and commit.step > beyond]
        if len(new) >= SETTLED:
            return new[-SETTLED]
    return None


def victims_generation(members: Mapping[int, Sequence[int]], pid: int) -> int:
    """The newest generation that it was a member of."""
    return max(generation for generation, pids in members.items() if pid in pids)


def episodes(observed: Observed) -> list[Episode]:
    """What each kill cost, in order."""
    usual_s = step_s(observed)
    return [_episode(observed, kill, usual_s) for kill in observed.kills]


def _episode(observed: Observed, kill: Kill, usual_s: float) -> Episode:
    old = victims_generation(observed.members, kill.pid)
    before = [commit for commit in observed.commits if commit.generation <= old]
    after = [commit for commit in observed.commits if commit.generation > old]
    highest = max(commit.step for commit in before)
    last = max(before, key=lambda commit: commit.at)
    following = next((commit for commit in after if commit.step > highest), None)
    if following is None:
        raise NotRecovered(f"after the kill of process {kill.pid} no step beyond {highest} was committed")
    redone = [c for c in after if c.generation <= following.generation and c.step <= highest]

    def lost(until: Commit) -> float:
        return (until.at - last.at) / usual_s - (until.step - highest)

    whole = whole_again(observed.workers, observed.commits, observed.members, after=old, beyond=highest)
    next_s = following.at - kill.at
    decided = min((one for one in observed.decided_at.items() if one[0] > old), default=None)
    recomputed = overhead_s = None
    if observed.shard_s is not None:
        taken_over = [n for g, n in observed.recomputed.items() if old < g <= following.generation]
        recomputed = sum(taken_over)
        survivors = max(1, observed.workers - 1)
        left_s = max(0.0, last.at + usual_s - kill.at)
        overhead_s = next_s - left_s - math.ceil(recomputed / survivors) * observed.shard_s
    return Episode(
        next_commit_s=next_s,
        redone_steps=len({commit.step for commit in redone}),
        lost_steps=lost(following),
        lost_until_whole_steps=None if whole is None else lost(whole),
        decided_s=None if decided is None else decided[1] - kill.at,
        recomputed_shards=recomputed,
        overhead_s=overhead_s,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank: a value that was measured. With fewer than 100 values the 99th percentile is the highest.

    >>> percentile([3.0, 1.0, 2.0], 99), percentile([float(i) for i in range(200)], 99)
    (3.0, 197.0)
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass(frozen=True)
class Statistics:
    median: float
    p99: float
    low: float
    high: float
    values: list[float]


def statistics_of(values: Sequence[float | int | None]) -> Statistics | None:
    """None when there is nothing of this kind (a peer has no shards, say)."""
    there = [float(value) for value in values if value is not None]
    if not there:
        return None
    return Statistics(statistics.median(there), percentile(there, 99), min(there), max(there), there)


def summary(observed: Observed) -> dict[str, Any]:
    """All figures of one run, as JSON; each of `Episode`'s fields with its statistics."""
    found = episodes(observed)
    columns = {name: [getattr(one, name) for one in found] for name in Episode.__dataclass_fields__}
    figures: dict[str, Any] = {"kills": len(found), "step_s": step_s(observed), "shard_s": observed.shard_s}
    for name, values in columns.items():
        described = statistics_of(values)
        figures[name] = None if described is None else asdict(described)
    return figures
