"""When a dead reader is replaced, and when the run ends."""

from __future__ import annotations

from distbelief.data.rules.readerdeaths import MOST_FORK_FAILURES, MOST_IDLE, Deaths, Forks


def test_only_the_samples_of_both_deaths_are_named() -> None:
    """Members that change cut the same samples into other batches."""
    deaths = Deaths().died([11, 12, 13, 14])
    assert deaths.killed_before([1, 2]) == []
    assert deaths.killed_before([15, 14, 13]) == [13, 14]
    assert deaths.answered([13]).killed_before([15, 14, 13]) == [14]
    assert deaths.answered([11, 12, 13, 14]) == Deaths()


def test_samples_that_are_no_longer_to_be_read_are_forgotten() -> None:
    deaths = Deaths().died([11, 12]).died([]).only([12, 13])
    assert deaths.killed_before([11, 12, 13]) == [12]
    assert deaths.idle == 1
    assert Deaths().died([5]).only([]).killed_before([5]) == []


def test_a_long_run_with_a_death_now_and_then_goes_on() -> None:
    deaths = Deaths()
    for sample in range(1000):
        assert not deaths.killed_before([sample % 7])
        deaths = deaths.died([sample % 7]).died([]).answered([sample % 7])
        assert not deaths.too_many_idle(1)
    assert deaths == Deaths()


def test_idle_readers_that_die_again_and_again() -> None:
    deaths = Deaths()
    for _ in range(2 * MOST_IDLE - 1):
        deaths = deaths.died([])
    assert deaths.too_many_idle(1)
    assert not deaths.too_many_idle(2)
    assert deaths.died([]).too_many_idle(2)
    assert not deaths.answered([1]).too_many_idle(1)


def test_forks_are_tried_for_about_half_a_minute() -> None:
    forks, now, pauses = Forks(), 100.0, []
    assert forks.is_due(now)
    while not forks.too_many:
        forks = forks.failed(now)
        assert not forks.is_due(now)
        pauses.append(forks.next_at - now)
        now = forks.next_at
        assert forks.is_due(now)
    assert len(pauses) == MOST_FORK_FAILURES
    assert pauses == sorted(pauses)
    assert 20 < sum(pauses[:-1]) < 60
