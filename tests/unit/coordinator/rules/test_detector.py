from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distbelief.coordinator.rules.detector import FLOOR_S, Pulse, Suspect, suspects
from distbelief.options import STUCK_AFTER_S

TICK_S = 0.1
BEAT_S = 0.2
Gap = Callable[[], float]


def punctual() -> float:
    return BEAT_S


@dataclass
class Run:
    """A run in virtual time: members send heartbeats, rank 0 reports steps, and the detector looks at every tick."""

    step_s: float
    members: Sequence[int] = (0, 1, 2, 3)
    gap: Gap = punctual
    now: float = 1000.0
    pulse: Pulse = field(default_factory=Pulse)
    found: list[Suspect] = field(default_factory=list)
    silent: frozenset[int] = frozenset()
    """Members whose heartbeats do not reach us."""
    standing: bool = False
    """No step is committed."""
    waiting: frozenset[int] = frozenset()
    startup_s: float = 60.0
    skew_s: Callable[[int], float] = lambda step: 0.0
    """How far the clock is ahead that the step is reported by."""

    def __post_init__(self) -> None:
        self.step = 0
        self.unreported: list[float] = []
        self.begin()

    def begin(self) -> None:
        self.pulse = self.pulse.restart(self.members, self.now).ticked(self.now)
        self.next_step = self.now + self.step_s
        self.next_beat = {worker: self.now + self.gap() for worker in self.members}

    def tick(self) -> list[Suspect]:
        self.now += TICK_S
        while not self.standing and self.next_step <= self.now:
            self.unreported.append(self.next_step + self.skew_s(self.step))
            self.step += 1
            self.next_step += self.step_s
        if self.standing:
            self.next_step = self.now + self.step_s
        for worker in self.members:
            if worker in self.silent:
                self.next_beat[worker] = self.now + self.gap()
            elif self.next_beat[worker] <= self.now:
                self.next_beat[worker] = self.now + self.gap()
                self.pulse = self.pulse.heard(worker, self.step, worker in self.waiting, self.now)
                if worker == self.members[0]:
                    self.pulse = self.pulse.committed(self.unreported, self.now)
                    self.unreported = []
        self.pulse = self.pulse.ticked(self.now)
        self.found = suspects(self.pulse, self.now, FLOOR_S, self.startup_s)
        return self.found

    def run(self, for_s: float) -> list[Suspect]:
        """Until somebody is suspected."""
        end = self.now + for_s
        while self.now < end and not self.tick():
            pass
        return self.found

    def freeze(self, *workers: int) -> None:
        self.silent, self.standing = frozenset(workers), True


def noisy(seed: int, longest_s: float = 1.0) -> Gap:
    """Heartbeats of a busy host: mostly in time, some late, a few very late."""
    chance = random.Random(seed)

    def gap() -> float:
        kind = chance.random()
        if kind < 0.8:
            return chance.uniform(0.2, 0.25)
        return chance.uniform(0.2, 0.5 if kind < 0.97 else longest_s - TICK_S)  # a tick later we have taken it in

    return gap


# --- frozen ----------------------------------------------------------------------------------------------------------


def test_a_frozen_member_is_suspected_after_the_floor_when_steps_are_short() -> None:
    run = Run(step_s=0.02)
    assert not run.run(10)
    run.freeze(2)
    frozen_at = run.now
    (suspect,) = run.run(10)
    assert suspect.worker == 2
    assert run.now - frozen_at <= FLOOR_S + 2 * TICK_S
    assert suspect.silent_s > suspect.deadline_s == FLOOR_S
    assert suspect.reason == (
        f"worker 2 is frozen: no heartbeat for {suspect.silent_s:.1f} s (at most 1.0 s is usual for it) and no step "
        f"committed for {suspect.stalled_s:.1f} s (at most 1.0 s is usual)"
    )


def test_long_steps_give_a_long_deadline() -> None:
    run = Run(step_s=10)
    assert not run.run(103)
    run.freeze(1)
    frozen_at = run.now
    (suspect,) = run.run(100)
    assert suspect.worker == 1
    # The step under way began 3 s before: it could have ended 7 s after. A step's time again without news is too much.
    assert 7 < run.now - frozen_at < 17


def test_spread_of_the_step_times_gives_more_time() -> None:
    def deadline_s(durations: Sequence[float]) -> float:
        pulse = Pulse().restart([0, 1], 0.0)
        at = [sum(durations[:end]) for end in range(len(durations) + 1)]
        return pulse.heard(0, 0, False, 0.0).committed(at, at[-1])._steps.deadline_s(FLOOR_S, 60.0)

    assert deadline_s([5.0] * 10) < deadline_s([4.0, 6.0, 5.0, 5.5, 4.5] * 2) < 15
    assert deadline_s([5.0] * 9 + [500.0]) == deadline_s([5.0] * 10)  # one outlier, such as an evaluation


def test_before_steps_are_measured_the_startup_deadline_holds() -> None:
    run = Run(step_s=1.0, startup_s=30.0)
    assert not run.run(2.5)
    run.freeze(3)
    assert not run.run(25)
    assert [suspect.worker for suspect in run.run(10)] == [3]


def test_several_frozen_members_are_found_at_once() -> None:
    run = Run(step_s=0.05)
    run.run(5)
    run.freeze(3, 1)
    assert [suspect.worker for suspect in run.run(5)] == [1, 3]


def test_the_only_member_can_be_suspected() -> None:
    run = Run(step_s=0.05, members=[7])
    assert not run.run(5)
    run.freeze(7)
    assert [suspect.worker for suspect in run.run(5)] == [7]


@pytest.mark.parametrize("step_s", [0.02, 0.3, 2.0])
@pytest.mark.parametrize("seed", range(10))
def test_a_freeze_is_always_found_even_where_heartbeats_are_late(step_s: float, seed: int) -> None:
    run = Run(step_s=step_s, gap=noisy(seed))
    assert not run.run(30)
    run.freeze(seed % 4)
    assert [suspect.worker for suspect in run.run(15)] == [seed % 4]


# --- healthy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_a_healthy_member_on_a_busy_host_is_never_suspected(seed: int) -> None:
    """Also while the run stands still for long: an evaluation, or a slow step."""
    chance = random.Random(seed)
    run = Run(step_s=0.02, gap=noisy(seed + 100))
    for _ in range(20):
        run.standing = chance.random() < 0.5
        assert not run.run(chance.uniform(1, 10))


def test_a_silent_member_is_left_alone_while_steps_are_committed() -> None:
    run = Run(step_s=0.1)
    run.run(5)
    run.silent = frozenset([2])
    assert not run.run(300)


def test_steps_that_others_have_applied_count_when_the_reporter_is_cut_off() -> None:
    run = Run(step_s=0.1)
    run.run(5)
    run.silent = frozenset([0])  # rank 0, the only one that reports commits
    assert not run.run(60)


def test_a_long_evaluation_is_no_freeze() -> None:
    run = Run(step_s=0.02)
    run.run(5)
    run.standing, run.waiting = True, frozenset([1, 2, 3])
    assert not run.run(STUCK_AFTER_S - 10)


def test_gaps_seen_before_give_a_later_deadline() -> None:
    calm, loaded = Run(step_s=0.02), Run(step_s=0.02)
    for run in (calm, loaded):
        run.run(10)
    for _ in range(5):
        loaded.silent = frozenset([2])
        loaded.run(1.2)
        loaded.silent = frozenset()
        loaded.run(1)
    for run in (calm, loaded):
        run.freeze(2)
    (early,), (late,) = calm.run(20), loaded.run(20)
    assert early.deadline_s < late.deadline_s < 5


def test_load_that_the_others_show_protects_a_member_that_was_punctual() -> None:
    run = Run(step_s=0.02)
    run.run(10)
    run.silent = frozenset([0, 1, 2])
    run.run(1.4)
    run.silent = frozenset()
    run.run(2)
    run.freeze(3)
    assert not run.run(2)
    assert [suspect.worker for suspect in run.run(2)] == [3]


def test_an_outage_is_not_remembered_whole() -> None:
    run = Run(step_s=0.02)
    run.run(5)
    run.silent = frozenset([2])
    assert not run.run(120)  # cut off from us, while the run went on
    run.silent = frozenset()
    run.run(5)
    run.freeze(2)
    assert [suspect.worker for suspect in run.run(11)] == [2]


# --- our own pauses --------------------------------------------------------------------------------------------------


def test_after_our_own_pause_everybody_has_a_deadline_again() -> None:
    run = Run(step_s=0.02)
    run.run(10)
    run.standing = True
    run.now += 3600  # a suspended laptop: nothing arrived, and the first tick comes before the first heartbeat
    assert not suspects(run.pulse, run.now, FLOOR_S)
    run.next_beat = dict.fromkeys(run.members, run.now + 0.8)
    assert not run.run(0.9)
    run.standing = False
    assert not run.run(20)


def test_our_own_pause_does_not_make_the_deadlines_longer() -> None:
    run = Run(step_s=0.02)
    run.run(10)
    run.now += 30
    run.run(2)
    run.freeze(1)
    assert [suspect.worker for suspect in run.run(FLOOR_S + 2 * TICK_S)] == [1]


def test_a_member_that_froze_during_our_pause_is_found() -> None:
    run = Run(step_s=0.02)
    run.run(10)
    run.now += 5
    run.freeze(1)
    assert [suspect.worker for suspect in run.run(3)] == [1]


def test_a_coordinator_that_is_always_slow_still_finds_a_freeze() -> None:
    run = Run(step_s=0.02)
    run.run(5)
    for _ in range(30):
        run.now += 1.4  # each round of its loop takes 1.5 s
        assert not run.tick()
    run.freeze(1)
    for _ in range(20):
        run.now += 1.4
        if run.tick():
            break
    assert [suspect.worker for suspect in run.found] == [1]


def test_all_silent_at_once_is_our_own_trouble_for_as_long_as_the_users_timeout() -> None:
    run = Run(step_s=0.02)
    run.run(10)
    run.freeze(*run.members)
    assert not run.run(STUCK_AFTER_S - 5)
    assert [suspect.worker for suspect in run.run(10)] == [0, 1, 2, 3]


def test_clocks_of_reporters_that_differ_by_hours_lengthen_no_deadline() -> None:
    """In asynchronous runs the members of two hosts commit in turn, each by its own host's clock."""
    run = Run(step_s=0.5, skew_s=lambda step: 3 * 3600.0 * (step % 2))
    assert not run.run(30)
    assert run.pulse.step_s is not None
    assert run.pulse.step_s < 10 * run.step_s
    run.freeze(2)
    assert [suspect.worker for suspect in run.run(10)] == [2]


def test_a_step_that_took_hours_while_the_reporters_clock_was_right_counts() -> None:
    run = Run(step_s=2000.0, members=(0,))
    run.run(7 * 2000.0)
    assert run.pulse.step_s == pytest.approx(2000.0)


# --- stuck -----------------------------------------------------------------------------------------------------------


def test_a_member_for_which_all_others_wait_is_stuck_after_the_users_timeout() -> None:
    run = Run(step_s=0.02)
    run.run(10)
    run.standing, run.waiting = True, frozenset([0, 1, 3])
    assert not run.run(STUCK_AFTER_S - 5)
    (suspect,) = run.run(10)
    assert suspect.worker == 2
    assert "stuck in its own code: all 3 others have waited for it for 300 s" in suspect.reason
    assert suspect.silent_s < 1


def test_our_own_pause_is_no_time_that_others_waited() -> None:
    run = Run(step_s=0.02)
    run.run(10)
    run.standing, run.waiting = True, frozenset([0, 1, 3])
    run.run(10)
    run.now += 3600
    assert not run.run(STUCK_AFTER_S - 5)
    assert [suspect.worker for suspect in run.run(10)] == [2]


def test_slow_steps_put_off_the_suspicion_that_a_member_is_stuck() -> None:
    run = Run(step_s=30.0)
    run.run(400)
    run.standing, run.waiting = True, frozenset([0, 1, 3])
    assert not run.run(2 * STUCK_AFTER_S)
    assert [suspect.worker for suspect in run.run(1000)] == [2]


@pytest.mark.parametrize("waiting", [[0, 1], [0, 1, 2, 3], []])
def test_nobody_is_stuck_unless_exactly_one_computes(waiting: list[int]) -> None:
    run = Run(step_s=0.02)
    run.run(5)
    run.standing, run.waiting = True, frozenset(waiting)
    assert not run.run(2 * STUCK_AFTER_S)


def test_a_single_member_is_never_stuck() -> None:
    run = Run(step_s=0.02, members=[0])
    run.run(5)
    run.standing = True
    assert not run.run(2 * STUCK_AFTER_S)


# --- membership ------------------------------------------------------------------------------------------------------


def test_a_new_generation_has_more_time_for_its_first_commit() -> None:
    run = Run(step_s=0.02)
    run.run(10)
    run.members = [0, 1, 2]
    run.begin()
    run.freeze(2)
    assert not run.run(2.5 * FLOOR_S)
    assert [suspect.worker for suspect in run.run(2)] == [2]


def test_a_newcomer_has_more_time_until_its_heartbeats_are_known() -> None:
    run = Run(step_s=0.02)
    run.run(10)
    run.members = [0, 1, 4]
    run.begin()
    run.run(0.5)
    run.freeze(4)
    assert not run.run(2.5 * FLOOR_S)
    assert [suspect.worker for suspect in run.run(2)] == [4]


def test_who_is_no_member_is_not_counted() -> None:
    pulse = Pulse().restart([0, 1], 0.0)
    assert pulse.heard(9, 5, True, 1.0) is pulse
    assert pulse.left(9, 1.0) is pulse
    assert suspects(Pulse(), 1e9) == []


def test_nothing_is_expected_of_a_member_that_has_left() -> None:
    run = Run(step_s=0.02)
    run.run(5)
    run.pulse = run.pulse.left(3, run.now)
    run.freeze(3)
    assert run.pulse.members == 3
    assert not run.run(60)


def test_a_heartbeat_changes_no_older_value() -> None:
    before = Pulse().restart([0, 1], 0.0)
    before.heard(0, 3, True, 1.0).committed([1.0, 2.0], 2.0).ticked(2.0)
    assert before == Pulse().restart([0, 1], 0.0)


def test_ten_thousand_members_cost_a_page_per_heartbeat() -> None:
    pulse = Pulse().restart(range(10_000), 0.0)
    after = pulse.heard(5_000, 1, True, 0.2)
    changed = [number for number in after._pages if after._pages[number] is not pulse._pages[number]]
    copied = len(after._pages) + sum(len(after._pages[number]) for number in changed)
    assert len(changed) == 1
    assert copied < 300  # pointers, of 10,000 members
    assert after.committed([1.0, 2.0], 2.0)._pages is after._pages
    assert after.ticked(2.0)._pages is after._pages


events = st.lists(
    st.one_of(
        st.tuples(st.just("heard"), st.integers(0, 6), st.booleans()),
        st.tuples(st.just("committed"), st.integers(0, 40), st.booleans()),
        st.tuples(st.just("left"), st.integers(0, 6), st.booleans()),
        st.tuples(st.just("restart"), st.integers(1, 6), st.booleans()),
        st.tuples(st.just("ticked"), st.integers(0, 1), st.booleans()),
    ),
    max_size=80,
)


@settings(max_examples=60, deadline=None)
@given(events, st.lists(st.floats(-2.0, 20.0), min_size=80, max_size=80))
def test_counts_are_right_and_memory_bounded_whatever_happens(
    happened: list[tuple[str, int, bool]], passed: list[float]
) -> None:
    pulse, now = Pulse().restart(range(4), 0.0), 0.0
    for (kind, number, flag), seconds in zip(happened, passed, strict=False):
        now += seconds
        if kind == "heard":
            pulse = pulse.heard(number, int(now), flag, now)
        elif kind == "committed":
            pulse = pulse.committed([now + 0.01 * index for index in range(number)], now)
        elif kind == "left":
            pulse = pulse.left(number, now)
        elif kind == "restart":
            pulse = pulse.restart(range(number), now)
        else:
            pulse = pulse.ticked(now)
        members = {worker: beat for page in pulse._pages.values() for worker, beat in page.items()}
        assert pulse.members == len(members)
        assert pulse.waiting == sum(beat.waiting for beat in members.values())
        assert (pulse.alone_since is not None) <= (pulse.waiting == pulse.members - 1)
        assert all(len(beat.gaps) <= 15 for beat in members.values())
        assert len(pulse._steps.durations) <= 15
        for suspect in suspects(pulse, now, FLOOR_S, startup_s=5.0, stuck_after_s=10.0):
            assert suspect.worker in members
            assert suspect.stalled_s > FLOOR_S
