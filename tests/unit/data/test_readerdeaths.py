"""When a dead reader is replaced, and when the run ends."""

from __future__ import annotations

from distbelief.data.rules.readerdeaths import MOST_FORK_FAILURES, MOST_IDLE, Deaths, Forks


def test_only_the_samples_of_both_deaths_are_guilty() -> None:
    """Members that change cut the same samples into other batches."""
    deaths = Deaths().died([11, 12, 13, 14])
    assert deaths.guilty([1, 2]) == []
    assert deaths.guilty([15, 14, 13]) == [13, 14]
    assert deaths.answered([13]).guilty([15, 14, 13]) == [14]
    assert deaths.answered([11, 12, 13, 14]) == Deaths()


def test_a_long_run_with_a_death_now_and_then_goes_on() -> None:
    deaths = Deaths()
    for sample in range(1000):
        assert not deaths.guilty([sample % 7])
        deaths = deaths.died([sample % 7]).died([]).answered([sample % 7])
        assert not deaths.in_vain(1)
    assert deaths == Deaths()


def test_idle_readers_that_die_again_and_again() -> None:
    deaths = Deaths()
    for _ in range(2 * MOST_IDLE - 1):
        deaths = deaths.died([])
    assert deaths.in_vain(1)
    assert not deaths.in_vain(2)
    assert deaths.died([]).in_vain(2)
    assert not deaths.answered([1]).in_vain(1)


def test_forks_are_tried_for_about_half_a_minute() -> None:
    forks, now, pauses = Forks(), 100.0, []
    assert forks.is_due(now)
    while not forks.hopeless:
        forks = forks.failed(now)
        assert not forks.is_due(now)
        pauses.append(forks.next_at - now)
        now = forks.next_at
        assert forks.is_due(now)
    assert len(pauses) == MOST_FORK_FAILURES
    assert pauses == sorted(pauses)
    assert 20 < sum(pauses[:-1]) < 60
