"""Workers that die again and again, and starts that a host refuses: the next one is started later."""

from __future__ import annotations

import pytest

from distbelief.control import messages as m
from distbelief.coordinator.rules.faults import MOST_REFUSED, MOST_STARTS
from distbelief.coordinator.rules.restarts import FREE, LONGEST_S, Restarts
from tests.support.coordinator.play import Run, ended, hired, records, report, texts

WHY = "no more processes are allowed here (pids.max of the control group /a: 9, in use 9)"


def deaths(count: int, every_s: float, target: int = 2) -> list[float]:
    """The pause after each of these deaths."""
    restarts, pauses = Restarts(), []
    for number in range(count):
        now = number * every_s
        restarts = restarts.died(now, target)
        pauses.append(restarts.wait_s(now))
    return pauses


def test_the_first_deaths_cost_nothing_and_the_pause_doubles_after_them() -> None:
    pauses = deaths(FREE + 2 + 12, every_s=0.0)
    assert pauses[: FREE + 2] == [0.0] * (FREE + 2)
    assert pauses[FREE + 2 :][:4] == [1.0, 2.0, 4.0, 8.0]
    assert pauses[-1] == LONGEST_S


def test_a_death_now_and_then_is_forgiven_and_a_quick_one_is_not() -> None:
    assert not any(deaths(1000, every_s=60.0))
    assert deaths(1000, every_s=5.0)[-1] == LONGEST_S


def test_a_large_run_has_more_deaths_and_a_lost_host_with_many_workers_is_replaced_at_once() -> None:
    assert not any(deaths(64, every_s=0.0, target=64))
    assert not any(deaths(1000, every_s=7.0, target=64))
    assert any(deaths(1000, every_s=7.0, target=2))


def test_after_a_quiet_time_all_is_as_in_the_beginning() -> None:
    restarts = Restarts()
    for _ in range(100):
        restarts = restarts.died(0.0, 2)
    later = 60.0 * (FREE + 2 + 9)
    assert restarts.wait_s(later) == restarts.died(later, 2).wait_s(later) == 0


@pytest.mark.parametrize("jump_s", [-7200.0, 7200.0])
def test_a_clock_that_is_set_does_not_stop_starts(jump_s: float) -> None:
    restarts = Restarts()
    for _ in range(100):
        restarts = restarts.died(10_000.0, 2)
    assert restarts.wait_s(10_000.0) == LONGEST_S
    assert restarts.wait_s(10_000.0 + jump_s) == 0
    again = restarts.died(10_000.0 + jump_s, 2)
    assert 0 <= again.wait_s(10_000.0 + jump_s) <= LONGEST_S


def test_refused_starts_are_slowed_from_the_first_on_and_those_of_one_moment_count_once() -> None:
    restarts = Restarts().died(0.0, 4, refused=True)
    assert restarts.wait_s(0.0) == 1.0
    assert restarts.died(0.1, 4, refused=True) == restarts
    assert restarts.died(1.0, 4, refused=True).wait_s(1.0) == pytest.approx(2.0, abs=0.1)


def engine(*running: int) -> m.EngineAttached:
    return m.EngineAttached("here", running={worker: 100 + worker for worker in running})


def test_a_worker_that_dies_after_every_step_is_started_later_and_later() -> None:
    run = Run().started(0, 1)
    now, said, newest = 1.0, [], 1
    for step in range(30):
        run.beat(0, step=step + 1, now=now, reports=[report(step, generation=run.state.generation)])
        assert run.state.troubles.losses == 0
        outputs = run.kill(newest, now=now)
        said += [texts(outputs)] * ("again and again" in texts(outputs))
        asked = now
        while not (new := hired(outputs)):
            now += 1.0
            outputs = run.feed(engine(0), now=now)
            assert now < asked + LONGEST_S + 2
        (newest,) = new
        run.arrive(newest, now=now)
        assert run.members == [0, newest]
    assert now > 300
    assert "workers die again and again: the next one is started in 1 s" in said[0]
    assert int(said[-1].rpartition("is started in ")[2].split()[0]) > LONGEST_S / 2


def refused(worker: int) -> m.WorkerExited:
    return m.WorkerExited(worker, m.STATUS_NOT_STARTED, WHY)


def test_a_refused_start_is_tried_again_after_a_pause_and_the_limit_is_named() -> None:
    run = Run().started(0, 1)
    assert hired(run.kill(1)) == [2]
    outputs = run.feed(refused(2), now=2.0)
    assert f"worker 2 could not be started: {WHY}" in texts(outputs)
    assert "the next one is started in 1 s" in texts(outputs)
    assert hired(outputs) == hired(run.feed(engine(0), now=2.5)) == []
    assert records(outputs, "exited")[0]["status"] == m.STATUS_NOT_STARTED
    assert hired(run.feed(engine(0), now=3.1)) == [3]
    run.arrive(3, now=3.2)
    assert run.members == [0, 3]


def test_refused_starts_are_tried_for_minutes_and_then_no_more() -> None:
    run = Run().started(0, 1)
    run.kill(1)
    now, tries = 1.0, 1
    while run.state.hired or run.state.restarts.wait_s(now):
        for worker in list(run.state.hired):
            run.feed(refused(worker), now=now)
            tries += 1
        now += 1.0
        run.feed(engine(0), now=now)
        assert now < 3600
    assert tries == MOST_REFUSED + 1
    assert now > 120
    assert "no more are started (distbelief scale tries again)" in texts(run.outputs)
    assert run.state.phase == "training"
    assert hired(run.feed(m.ScaleRequested(workers=2), now=now)) == [12]


def test_before_the_start_too_and_the_end_names_the_limit() -> None:
    run = Run(workers=3)
    run.arrive(0)
    now, outputs = 1.0, run.feed(refused(1), refused(2))
    assert "worker 1 could not be started" in texts(outputs)
    while run.state.phase == "gathering":
        now += 0.5
        outputs = run.feed(engine(0), *(refused(worker) for worker in run.state.hired), now=now)
        assert now < 300
    assert WHY in ended(run.outputs)["reason"]
    assert MOST_STARTS * 3 <= run.state.next_worker < MOST_STARTS * 3 + 3
