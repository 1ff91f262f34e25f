"""Decides what follows when reader processes die, or cannot be forked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

MOST_IDLE = 5
"""Deaths of idle readers in a row, per reader process and with no batch in between, after which the run ends."""
MOST_FORK_FAILURES = 10
"""Failed forks in a row after which a worker without any reader gives up: about half a minute."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


@dataclass(frozen=True)
class Deaths:
    """Deaths of readers, as far as a later death is judged by them.

    >>> deaths = Deaths().died([4, 5])
    >>> deaths.killed_before([5, 6]), deaths.answered([4, 5]).killed_before([5, 6])
    ([5], [])
    """

    samples: frozenset[int] = frozenset()
    """What was being read when a reader died, and what no reader has read since."""
    idle: int = 0
    """Deaths of idle readers in a row."""

    def killed_before(self, samples: Iterable[int]) -> list[int]:
        """Which of `samples` another reader was reading when it died."""
        return sorted(self.samples.intersection(samples))

    def died(self, samples: Iterable[int]) -> Deaths:
        """A reader died. `samples`: what it was reading; empty: it was idle."""
        found = frozenset(samples)
        return Deaths(self.samples | found, self.idle if found else self.idle + 1)

    def answered(self, samples: Iterable[int]) -> Deaths:
        """A reader has read these samples."""
        if not self.samples and not self.idle:
            return self
        return Deaths(self.samples.difference(samples))

    def only(self, samples: Iterable[int]) -> Deaths:
        """No other samples than these are still to be read. A later death at one of the others proves nothing: nobody
        tried in between whether they can be read."""
        return replace(self, samples=self.samples.intersection(samples))

    def too_many_idle(self, processes: int) -> bool:
        """Whether readers die although they read nothing, so that another one would die too."""
        return self.idle >= MOST_IDLE * processes


@dataclass(frozen=True)
class Forks:
    """Failed forks in a row: each pause before the next attempt is twice as long.

    >>> forks = Forks().failed(now=7.0).failed(now=8.0)
    >>> forks.next_at, forks.is_due(8.1), forks.too_many
    (8.2, False, False)
    """

    failures: int = 0
    next_at: float = 0.0

    def failed(self, now: float) -> Forks:
        pause_s = min(_FIRST_PAUSE_S * 2**self.failures, _LONGEST_PAUSE_S)
        return replace(self, failures=self.failures + 1, next_at=now + pause_s)

    def is_due(self, now: float) -> bool:
        return now >= self.next_at

    @property
    def too_many(self) -> bool:
        return self.failures >= MOST_FORK_FAILURES
