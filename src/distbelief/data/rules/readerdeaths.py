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
    """The deaths that matter: samples that were read when a reader died are suspects until a reader has read them.

    >>> deaths = Deaths().died([4, 5])
    >>> deaths.guilty([5, 6]), deaths.answered([4, 5]).guilty([5, 6])
    ([5], [])
    """

    suspects: frozenset[int] = frozenset()
    idle: int = 0

    def guilty(self, samples: Iterable[int]) -> list[int]:
        """The samples that have now killed two readers, if a reader dies that was reading `samples`."""
        return sorted(self.suspects.intersection(samples))

    def died(self, samples: Iterable[int]) -> Deaths:
        """A reader died. `samples`: those that it was reading; empty: it was idle."""
        found = frozenset(samples)
        return Deaths(self.suspects | found, self.idle if found else self.idle + 1)

    def answered(self, samples: Iterable[int]) -> Deaths:
        """A reader has read these samples."""
        if not self.suspects and not self.idle:
            return self
        return Deaths(self.suspects.difference(samples))

    def in_vain(self, processes: int) -> bool:
        """Whether readers die although they read nothing, so that another one would die too."""
        return self.idle >= MOST_IDLE * processes


@dataclass(frozen=True)
class Forks:
    """Failed forks in a row: each pause before the next attempt is twice as long.

    >>> forks = Forks().failed(now=7.0).failed(now=8.0)
    >>> forks.next_at, forks.is_due(8.1), forks.hopeless
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
    def hopeless(self) -> bool:
        return self.failures >= MOST_FORK_FAILURES
