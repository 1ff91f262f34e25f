"""Load balance: how fast each worker is, and whether moving shards between the members pays.

Measurements come in, assignments go out. The model: a step lasts as long as its slowest member computes,
max_i(n_i · shard_s_i); hosts and the cost of the exchange are not considered. A new assignment is proposed only if that
time falls by more than a threshold, by more than the estimates' own error, and in two looks in a row, so that noise
moves nothing.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from distbelief.control.messages import Timing
from distbelief.coordinator.rules.assignment import equal
from distbelief.shards import Range

INTERVAL_S = 0.5
"""A measurement is the mean over at least this time (over one step, where steps are longer)."""
KEPT = 7
"""Measurements per worker. The median ignores three bad ones; a real change shows after four, so in about 2 s."""
ENOUGH = 3
MIN_GAIN = 0.10
MIN_SHARDS = 4

_PAGE = 64
_LEAST_SHARD_S = 1e-9  # below the resolution of clocks; its inverse is finite
_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_DOUBT = 3.0  # standard errors; in 24,000 simulated looks with ±30 % noise, 2 of them moved shards 6 times, 3 never
_MEDIAN_ERROR = 1.2533  # sqrt(pi / 2): the standard error of a median, in sigma / sqrt(n)


@dataclass(frozen=True, slots=True)
class _Track:
    """One worker's measurements. The first three fields are the counters at the start of the present interval."""

    opened_at: float | None = None
    busy_s: float = 0.0
    shards: int = 0
    seen: int = 0
    recent: tuple[float, ...] = ()
    shard_s: float = 0.0
    error: float = 0.0


@dataclass(frozen=True)
class Speeds:
    """Seconds per shard (data and compute) of every worker: the median of its last few measurements.

    Immutable. Workers lie in pages, so that an observation copies one page and the list of pages instead of all.

    >>> speeds = Speeds()
    >>> for second in range(5):
    ...     speeds = speeds.observe(3, Timing(data_s=second * 0.1, compute_s=second * 0.9, shards=4 * second), second)
    >>> speeds.shard_s(3), speeds.shard_s(0), speeds.seen(3)
    (0.25, None, 16)
    """

    _pages: Mapping[int, Mapping[int, _Track]] = field(default_factory=dict)

    def observe(self, worker: int, timing: Timing, now: float) -> Speeds:
        """Take in a heartbeat's counters, which are cumulative since the generation's start."""
        track = self._track(worker) or _Track()
        busy_s = timing.data_s + timing.compute_s
        if timing.shards < track.seen or not math.isfinite(busy_s):
            return self  # an old message, or nonsense
        track = replace(track, seen=timing.shards)
        if track.opened_at is None or now < track.opened_at:  # it has just begun, or the clock was set back
            return self._with(worker, replace(track, opened_at=now, busy_s=busy_s, shards=timing.shards))
        done = timing.shards - track.shards
        if done > 0 and now - track.opened_at >= INTERVAL_S and busy_s > track.busy_s:
            recent = (*track.recent, max((busy_s - track.busy_s) / done, _LEAST_SHARD_S))[-KEPT:]
            shard_s, error = _median_and_error(recent)
            track = _Track(now, busy_s, timing.shards, timing.shards, recent, shard_s, error)
        return self._with(worker, track)

    def restart(self, alive: Iterable[int]) -> Speeds:
        """A generation begins: counters restart at 0; the measurements of live workers stay."""
        pages: dict[int, dict[int, _Track]] = {}
        for worker in alive:
            track = self._track(worker)
            if track is not None:
                pages.setdefault(worker // _PAGE, {})[worker] = replace(
                    track, opened_at=None, busy_s=0.0, shards=0, seen=0
                )
        return Speeds(pages)

    def shard_s(self, worker: int) -> float | None:
        """Seconds per shard, or None while there are too few measurements."""
        track = self._track(worker)
        return track.shard_s if track is not None and len(track.recent) >= ENOUGH else None

    def error(self, worker: int) -> float:
        """The relative standard error of `shard_s`, from the spread of the measurements."""
        track = self._track(worker)
        return track.error if track is not None else 0.0

    def seen(self, worker: int) -> int:
        """Shards computed since the generation's start."""
        track = self._track(worker)
        return track.seen if track is not None else 0

    def _track(self, worker: int) -> _Track | None:
        return self._pages.get(worker // _PAGE, {}).get(worker)

    def _with(self, worker: int, track: _Track) -> Speeds:
        number = worker // _PAGE
        return Speeds({**self._pages, number: {**self._pages.get(number, {}), worker: track}})


def _median_and_error(values: Sequence[float]) -> tuple[float, float]:
    middle = statistics.median(values)
    spread = _MAD_TO_SIGMA * statistics.median([abs(value - middle) for value in values])
    return middle, _MEDIAN_ERROR * spread / math.sqrt(len(values)) / middle


# --- which assignment ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Estimates:
    shard_s: Sequence[float]
    errors: Sequence[float]

    def step_s(self, ranges: Sequence[Range], doubt: float = 0.0) -> float:
        """The time of the slowest member, if every estimate is off by `doubt` times its error."""
        return max(
            (end - first) * shard_s * (1 + doubt * error)
            for (first, end), shard_s, error in zip(ranges, self.shard_s, self.errors, strict=True)
        )


def propose(
    ranges: Sequence[Range], members: Sequence[int], speeds: Speeds, min_gain: float = MIN_GAIN
) -> list[Range] | None:
    """A better assignment than `ranges` (both in rank order), or None when moving shards does not pay.

    It does not pay when a member has not computed `MIN_SHARDS` in this generation or is not measured yet, when the
    step's predicted time falls by less than `min_gain`, or when the errors of the estimates could explain the gain.
    """
    estimates = _estimates(ranges, members, speeds, MIN_SHARDS)
    if estimates is None:
        return None
    better = fastest(ranges, estimates.shard_s)
    return better if _pays(ranges, better, estimates, min_gain) else None


def assign(shards: int, members: Sequence[int], speeds: Speeds, min_gain: float = MIN_GAIN) -> list[Range]:
    """The assignment for new members: equal ranges, or by measured speed where that pays.

    A member that was never measured counts as fast as the median of the others.
    """
    ranges = equal(shards, len(members))
    known = [worker for worker in members if speeds.shard_s(worker) is not None]
    if not known:
        return ranges
    usual = _estimates([(0, 1)] * len(known), known, speeds, min_shards=0)
    assert usual is not None
    measured = dict(zip(known, zip(usual.shard_s, usual.errors, strict=True), strict=True))
    unknown = statistics.median(usual.shard_s), statistics.median(usual.errors)
    both = [measured.get(worker, unknown) for worker in members]
    estimates = _Estimates([shard_s for shard_s, _ in both], [error for _, error in both])
    better = fastest(ranges, estimates.shard_s)
    return better if _pays(ranges, better, estimates, min_gain) else ranges


def fastest(ranges: Sequence[Range], shard_s: Sequence[float]) -> list[Range]:
    """The assignment with the shortest step and no empty range; of several, the assignment nearest to `ranges`.

    Nearest: the sum over all shards of the number of ranks by which a shard moves is the least.

    >>> fastest([(0, 4), (4, 8), (8, 12), (12, 16)], [1, 3, 1, 1])
    [(0, 5), (5, 6), (6, 11), (11, 16)]
    """
    shards = ranges[-1][1]
    # Lower bounds: the work divided without rounding, and one shard on the slowest member.
    limit_s = max(max(shard_s), shards / math.fsum(1 / each for each in shard_s) * (1 - 1e-9))
    most = [_fit(limit_s, each) for each in shard_s]
    missing = shards - sum(most)
    if missing > 0:
        # Give each next shard to the member that would finish it first; so the last shard ends as early as possible.
        ends = [((count + 1) * each, rank) for rank, (count, each) in enumerate(zip(most, shard_s, strict=True))]
        heapq.heapify(ends)
        for _ in range(missing):
            limit_s, rank = ends[0]
            most[rank] += 1
            heapq.heapreplace(ends, ((most[rank] + 1) * shard_s[rank], rank))
        most = [_fit(limit_s, each) for each in shard_s]
    return _nearest(ranges, most)


def _fit(limit_s: float, shard_s: float) -> int:
    """The largest n with n · shard_s <= limit_s, by the same rounding with which step times are compared."""
    count = math.floor(limit_s / shard_s)
    while count * shard_s > limit_s:
        count -= 1
    while (count + 1) * shard_s <= limit_s:
        count += 1
    return count


def _nearest(ranges: Sequence[Range], most: Sequence[int]) -> list[Range]:
    """Cuts with 1 <= size_i <= most_i and the least sum of |cut - old cut|, exactly, in O(n log n).

    f_k(x), the least cost when member k ends at x, is convex: f_k(x) = |x - old_k| + min of f_{k-1} over
    [x - most_k, x - 1]. The two heaps hold the points where its slope changes, left and right of its minimum. That
    window moves all left points by 1 and all right ones by most_k; the distance to the old cut adds a point to each.
    """
    count = len(ranges)
    left, right = [0] * count, [0] * count  # f_0(0) = 0; elsewhere its slope exceeds the cost of all cuts
    moved_right = 0
    lowest: list[Range] = []
    for moved_left, ((_, old), size) in enumerate(zip(ranges[:-1], most[:-1], strict=True), start=1):
        moved_right += size
        beyond = -heapq.heappushpop(left, moved_left - old) + moved_left
        heapq.heappush(right, beyond - moved_right)
        below = heapq.heappushpop(right, old - moved_right) + moved_right
        heapq.heappush(left, moved_left - below)
        lowest.append((moved_left - left[0], right[0] + moved_right))
    cuts = [ranges[-1][1]]
    for (_, old), (low, high), size in zip(ranges[-2::-1], reversed(lowest), most[:0:-1], strict=True):
        wanted = min(max(old, low), high)
        cuts.append(min(max(wanted, cuts[-1] - size), cuts[-1] - 1))
    cuts.append(0)
    return [(first, end) for end, first in pairwise(cuts)][::-1]


def _estimates(ranges: Sequence[Range], members: Sequence[int], speeds: Speeds, min_shards: int) -> _Estimates | None:
    if len(ranges) != len(members):
        raise ValueError(f"{len(ranges)} ranges for {len(members)} members; each member has one range")
    shard_s: list[float] = []
    for worker in members:
        estimate = speeds.shard_s(worker)
        if estimate is None or speeds.seen(worker) < min_shards:
            return None
        shard_s.append(estimate)
    errors = [speeds.error(worker) for worker in members]
    # A few measurements can agree by luck: no member's error counts as less than the median of all.
    usual = statistics.median(errors)
    return _Estimates(shard_s, [max(error, usual) for error in errors])


def _pays(old: Sequence[Range], new: Sequence[Range], estimates: _Estimates, min_gain: float) -> bool:
    enough = estimates.step_s(new) <= (1 - min_gain) * estimates.step_s(old)
    return enough and estimates.step_s(new, doubt=_DOUBT) < estimates.step_s(old, doubt=-_DOUBT)


# --- twice in a row --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """The measurements and the proposal of the last look. A generation begins with an empty one."""

    members: tuple[int, ...] = ()
    ranges: tuple[Range, ...] = ()
    proposed: tuple[Range, ...] = ()


def look(
    last: Look, ranges: Sequence[Range], members: Sequence[int], speeds: Speeds, min_gain: float = MIN_GAIN
) -> tuple[Look, list[Range] | None]:
    """Called every few seconds: a new assignment once a proposal has paid in two looks in a row, else None.

    The two proposals need not be equal, since estimates vary a little: the last look's proposal must still pay now.
    """
    better = propose(ranges, members, speeds, min_gain)
    if better is None:
        return Look(), None
    now = Look(tuple(members), tuple(ranges), tuple(better))
    if not last.proposed or (last.members, last.ranges) != (now.members, now.ranges):
        return now, None
    estimates = _estimates(ranges, members, speeds, min_shards=0)
    if estimates is None or not _pays(ranges, last.proposed, estimates, min_gain):
        return now, None
    return Look(), better


def explain(old: Sequence[Range], new: Sequence[Range], members: Sequence[int], speeds: Speeds) -> str:
    """Why shards move, in one sentence about the member whose part changes most."""
    estimates = _estimates(old, members, speeds, min_shards=0)
    if estimates is None or len(members) < 2:
        return "the shards are divided anew; not every member's speed is known yet"
    sizes = [(before[1] - before[0], after[1] - after[0]) for before, after in zip(old, new, strict=True)]
    rank = max(range(len(members)), key=lambda r: (abs(math.log(sizes[r][1] / sizes[r][0])), -r))
    before, after = sizes[rank]
    others = statistics.median(each for r, each in enumerate(estimates.shard_s) if r != rank)
    ratio = estimates.shard_s[rank] / others
    if ratio >= 1.1:
        pace = f"needs {ratio:.1f} times as long per shard as"
    elif ratio <= 1 / 1.1:
        pace = f"needs only {ratio:.0%} of the time per shard of".replace("%", " %")
    else:
        pace = "needs about as long per shard as"
    gain = 100 * (estimates.step_s(old) / estimates.step_s(new) - 1)
    return (
        f"worker {members[rank]} {pace} the other{'s' if len(members) > 2 else ''}: "
        f"it has {after} of {new[-1][1]} shards now instead of {before} (predicted {gain:+.0f} % speed)"
    )
