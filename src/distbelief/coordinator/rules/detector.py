"""The failure detector: which members are frozen or stuck, and how long each is waited for.

Heartbeats and commits come in with their times (`Pulse`); `suspects` returns the members to kill, each with the reason.
faults.py kills them (`_fence`). This file kills nothing and knows no processes.

How it works:
- A member is suspected only while the run stands still, that is, no step was committed for the run's deadline. A member
  that is silent while steps are committed is merely cut off from us, and its shards are being computed.
- *Frozen*: no heartbeat for the member's deadline. That deadline follows from the gaps between its own heartbeats, and
  is at least twice the usual longest gap of all members and four times the coordinator's own tick
  (`_silence_deadline_s`); a newcomer has three times as long. The run's deadline follows from the measured step times
  (`_Steps.deadline_s`), and is three times as long for a generation's first step. So a frozen member of a quiet machine
  is found a little more than FLOOR_S after its last heartbeat, of a loaded machine later. Before steps are measured
  the run may stand still for STARTUP_S.
- *Stuck*: a member sends heartbeats, but all others have waited for it alone for `stuck_after_s` (the option
  --stuck-after), or for _STUCK times the run's deadline if that is longer.
- When all of several members are silent at once, the coordinator is probably cut off: nothing happens before
  `stuck_after_s`. A member that trains alone has its ordinary deadline.
- Pauses of the coordinator itself are no evidence against members: after one, every member has its whole deadline
  again.

To wait longer or shorter for a frozen worker, change FLOOR_S (the least), STARTUP_S, or the factors below them. A
frozen parameter server has rules of its own: SILENT_S in servers/lifecycle.py; a silent host: LOST_S in hosts.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from distbelief.options import STUCK_AFTER_S

FLOOR_S = 1.0
"""The shortest deadline. On a busy host a healthy control thread shows gaps of almost this length."""
STARTUP_S = 60.0
"""How long a run may stand still before the times of its steps are measured."""

_KEPT_STEPS = _KEPT_GAPS = 15  # the last measurements that medians are taken of
_ENOUGH_STEPS = 5  # with fewer, the run's deadline is STARTUP_S
_ENOUGH_GAPS = 5  # with fewer, a member's deadline is _NEWCOMER times the floor
_SPREADS = 6.0  # a deadline is the median plus this many spreads
_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_LEAST_SPREAD = 0.05  # of the median: a few equal measurements do not prove that the next is equal
_BEATS = 4.0  # a member may miss this many usual gaps, and as many ticks of the coordinator
_PEAKS = 2.0  # and be silent for this many times its longest gap, or the members' usual longest gap
_PEAK_HALF_LIFE_S = 60.0
_LONGEST_GAP_S = 5.0  # a longer one was an outage; remembering it whole would lengthen the deadline for minutes
_NEWCOMER = 3.0  # times the floor: a new member, and a generation that has not committed a step yet
_STUCK = 20.0  # times the run's deadline, before a member that sends heartbeats is stuck
_PAUSE_S = 1.0  # the coordinator has paused if it did not tick for this long, and
_PAUSE_TICKS = 5.0  # for this many usual ticks
_PAGE = 64  # members per page of `Pulse`


@dataclass(frozen=True, slots=True)
class _Beat:
    """One member's heartbeats."""

    at: float
    waiting: bool = False
    gaps: tuple[float, ...] = ()
    peak_s: float = 0.0
    """The longest gap, forgotten slowly, because the median of the gaps does not show rare long gaps."""

    def again(self, waiting: bool, now: float, since: float) -> _Beat:
        """The next heartbeat. The coordinator was running since `since`: only from then on is a gap the member's."""
        gap_s = min(max(now - max(self.at, since), 0.0), _LONGEST_GAP_S)
        peak_s = max(gap_s, self.peak_s * 0.5 ** (gap_s / _PEAK_HALF_LIFE_S))
        return _Beat(now, waiting, (*self.gaps, gap_s)[-_KEPT_GAPS:], peak_s)


@dataclass(frozen=True)
class _Steps:
    """The run's commits. `changed_at` and `measured_until` are read from the coordinator's clock; `durations` are
    differences of the reporting member's clock, and never longer in sum than the time that passed here."""

    step: int = -1
    changed_at: float = 0.0
    fresh: bool = True
    """Whether this generation has not committed a step yet."""
    last_at: float | None = None
    durations: tuple[float, ...] = ()
    measured_until: float = 0.0
    """The generation's start plus the durations since then."""

    def deadline_s(self, floor_s: float, startup_s: float) -> float:
        if len(self.durations) < _ENOUGH_STEPS:
            return max(floor_s, startup_s)
        return max(floor_s * (_NEWCOMER if self.fresh else 1.0), _typical_and_spread(self.durations))


@dataclass(frozen=True)
class _Ticks:
    """The coordinator's own loop: its last tick, the usual time between ticks, and the end of its last pause."""

    at: float | None = None
    typical_s: float = 0.0
    awake_at: float = 0.0

    def paused(self, now: float) -> bool:
        # Compared with the usual time: a coordinator that is always slow must not excuse all members for ever.
        return self.at is not None and now - self.at > max(_PAUSE_S, _PAUSE_TICKS * self.typical_s)

    def awake_since(self, now: float) -> float:
        return now if self.paused(now) else self.awake_at


@dataclass(frozen=True)
class Suspect:
    worker: int
    silent_s: float
    stalled_s: float
    deadline_s: float
    """The limit of the silence; for a stuck member, the limit of the run's standstill."""
    reason: str


@dataclass(frozen=True)
class Pulse:
    """The heartbeats of one generation's members, and its commits. Immutable.

    Members lie in pages, so that a heartbeat copies one page and the list of pages instead of all.
    """

    _pages: Mapping[int, Mapping[int, _Beat]] = field(default_factory=dict)
    members: int = 0
    waiting: int = 0
    """The number of members that wait for others, by their last heartbeats."""
    alone_since: float | None = None
    """Since when all members but one have been waiting."""
    _steps: _Steps = _Steps()
    _ticks: _Ticks = _Ticks()

    def restart(self, members: Iterable[int], now: float) -> Pulse:
        """A generation begins with these members. Measurements stay, and so do the beginnings of silences and of the
        run's standstill: else no member would ever be late in a run whose workers change all the time."""
        pages: dict[int, dict[int, _Beat]] = {}
        count = 0
        for worker in dict.fromkeys(members):
            known = self._beat(worker)
            beat = _Beat(now) if known is None else replace(known, waiting=False)
            pages.setdefault(worker // _PAGE, {})[worker] = beat
            count += 1
        # The reporting member and its clock may have changed, and the pause of the change is no step time.
        changed_at = self._steps.changed_at if self.members else now
        steps = replace(self._steps, changed_at=changed_at, fresh=True, last_at=None, step=-1, measured_until=now)
        return replace(self, _pages=pages, members=count, waiting=0, alone_since=None, _steps=steps)

    def heard(self, worker: int, step: int, waiting: bool, now: float) -> Pulse:
        """A heartbeat of this generation: the worker has applied `step` steps. Ignored if it is no member."""
        before = self._beat(worker)
        if before is None:
            return self
        number = worker // _PAGE
        beat = before.again(waiting, now, self._ticks.awake_since(now))
        pages = {**self._pages, number: {**self._pages[number], worker: beat}}
        count = self.waiting + waiting - before.waiting
        steps = self._steps
        if step > steps.step:
            # The first number in a generation is where it started, not a commit.
            moved = steps.step >= 0
            changed_at = now if moved else steps.changed_at
            steps = replace(steps, step=step, changed_at=changed_at, fresh=steps.fresh and not moved)
        return Pulse(pages, self.members, count, self._alone(self.members, count, now), steps, self._ticks)

    def alive(self, worker: int, now: float) -> Pulse:
        """A heartbeat of an earlier generation."""
        before = self._beat(worker)
        if before is None:
            return self
        number = worker // _PAGE
        beat = before.again(before.waiting, now, self._ticks.awake_since(now))
        return replace(self, _pages={**self._pages, number: {**self._pages[number], worker: beat}})

    def left(self, worker: int, now: float) -> Pulse:
        """A member has finished, or is known to be gone: no heartbeat is expected from it any more."""
        beat = self._beat(worker)
        if beat is None:
            return self
        number = worker // _PAGE
        page = {other: kept for other, kept in self._pages[number].items() if other != worker}
        members, waiting = self.members - 1, self.waiting - beat.waiting
        alone_since = self._alone(members, waiting, now)
        return Pulse({**self._pages, number: page}, members, waiting, alone_since, self._steps, self._ticks)

    def committed(self, at_times: Sequence[float], now: float) -> Pulse:
        """Steps were reported, committed at these times of the reporter's clock."""
        if not at_times:
            return self
        steps = self._steps
        times = at_times if steps.last_at is None else (steps.last_at, *at_times)
        durations, until = list(steps.durations), steps.measured_until
        for early, late in pairwise(times[-_KEPT_STEPS - 1 :]):
            # A difference that is not positive is a repeat. One that is longer than the time that passed here is of two
            # clocks: members of two hosts have committed the steps.
            if (took_s := min(late - early, now - until)) > 0:
                durations.append(took_s)
                until += took_s
        recent = tuple(durations[-_KEPT_STEPS:])
        steps = replace(
            steps, changed_at=now, fresh=False, last_at=at_times[-1], durations=recent, measured_until=until
        )
        return replace(self, _steps=steps)

    @property
    def step_s(self) -> float | None:
        """The mean time of the last steps. Not the median: in asynchronous runs steps come in bursts."""
        return statistics.fmean(self._steps.durations) if self._steps.durations else None

    def ticked(self, now: float) -> Pulse:
        """A round of the coordinator's own loop, after all waiting heartbeats. Notices when the loop had paused."""
        ticks = self._ticks
        if ticks.at is None:
            return replace(self, _ticks=_Ticks(at=now, awake_at=now))
        passed_s = min(now - ticks.at, _LONGEST_GAP_S)
        typical_s = ticks.typical_s + (passed_s - ticks.typical_s) / 8
        return replace(self, _ticks=_Ticks(now, typical_s, ticks.awake_since(now)))

    def stalled_s(self, now: float) -> float:
        """How long no step was committed, not counting pauses of the coordinator."""
        return now - max(self._steps.changed_at, self._ticks.awake_since(now))

    def silent_s(self, worker: int, now: float) -> float:
        """How long a member was silent, not counting pauses of the coordinator."""
        beat = self._beat(worker)
        return 0.0 if beat is None else now - max(beat.at, self._ticks.awake_since(now))

    def awake_s(self, now: float) -> float:
        """How long the coordinator's own loop has run without a pause."""
        return now - self._ticks.awake_since(now)

    def _alone(self, members: int, waiting: int, now: float) -> float | None:
        if waiting != members - 1:
            return None
        return now if self.alone_since is None else self.alone_since

    def _beat(self, worker: int) -> _Beat | None:
        return self._pages.get(worker // _PAGE, {}).get(worker)


def suspects(
    pulse: Pulse,
    now: float,
    floor_s: float = FLOOR_S,
    startup_s: float = STARTUP_S,
    stuck_after_s: float = STUCK_AFTER_S,
) -> list[Suspect]:
    """The members to kill, by number. While steps are committed this costs nothing, else one look at each member.

    `floor_s`: no deadline is shorter. `startup_s`: how long the run may stand still before its steps are measured.
    `stuck_after_s`: the least time for which a member may compute while all others wait for it.
    """
    stalled_s = pulse.stalled_s(now)
    run_deadline_s = pulse._steps.deadline_s(floor_s, startup_s)
    if not pulse.members or stalled_s <= run_deadline_s:
        return []
    silent = _silent(pulse, now, floor_s, stalled_s, run_deadline_s)
    if len(silent) == pulse.members > 1 and stalled_s <= stuck_after_s:
        return []  # all members silent at once: more likely the coordinator is cut off
    return silent or _stuck(pulse, now, max(stuck_after_s, _STUCK * run_deadline_s))


def _silent(pulse: Pulse, now: float, floor_s: float, stalled_s: float, run_deadline_s: float) -> list[Suspect]:
    awake_at = pulse._ticks.awake_since(now)
    if now - awake_at <= floor_s:
        return []
    late = {w: b for page in pulse._pages.values() for w, b in page.items() if now - b.at > floor_s}
    if not late:
        return []
    # Load slows all members of a host: the usual peak among them protects a member that was punctual until now.
    usual_peak_s = statistics.median(beat.peak_s for page in pulse._pages.values() for beat in page.values())
    least_s = max(floor_s, _PEAKS * usual_peak_s, _BEATS * pulse._ticks.typical_s)
    found = []
    for worker, beat in sorted(late.items()):
        silent_s = now - max(beat.at, awake_at)
        deadline_s = _silence_deadline_s(beat, floor_s, least_s)
        if silent_s > deadline_s:
            reason = (
                f"worker {worker} is frozen: no heartbeat for {silent_s:.1f} s (at most {deadline_s:.1f} s is usual "
                f"for it) and no step committed for {stalled_s:.1f} s (at most {run_deadline_s:.1f} s is usual)"
            )
            found.append(Suspect(worker, silent_s, stalled_s, deadline_s, reason))
    return found


def _silence_deadline_s(beat: _Beat, floor_s: float, least_s: float) -> float:
    if len(beat.gaps) < _ENOUGH_GAPS:
        return max(least_s, _NEWCOMER * floor_s)
    usual_s = max(_typical_and_spread(beat.gaps), _BEATS * statistics.median(beat.gaps))
    return max(least_s, usual_s, _PEAKS * beat.peak_s)


def _stuck(pulse: Pulse, now: float, deadline_s: float) -> list[Suspect]:
    """The member that sends heartbeats, but for which all others have waited for too long."""
    if pulse.alone_since is None or pulse.members < 2:
        return []  # if no other member waits, a long step and a hang look the same
    stalled_s = pulse.stalled_s(now)
    alone_s = min(now - pulse.alone_since, stalled_s)
    if alone_s <= deadline_s:
        return []
    worker, beat = next((w, b) for page in pulse._pages.values() for w, b in page.items() if not b.waiting)
    reason = (
        f"worker {worker} is stuck in its own code: all {pulse.members - 1} others have waited for it for "
        f"{alone_s:.0f} s (at most {deadline_s:.0f} s is allowed)"
    )
    return [Suspect(worker, now - beat.at, stalled_s, deadline_s, reason)]


def _typical_and_spread(values: Sequence[float]) -> float:
    """The median and several times the spread above it: what a healthy next value stays below."""
    middle = statistics.median(values)
    spread = _MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in values)
    return middle + _SPREADS * max(spread, _LEAST_SPREAD * middle)
