"""When a worker's pace is looked at again: after a stretch of updates that is long enough to tell something of it.

How the pace follows from what was measured is `strategies/ps/rules/pace.py`'s.
"""

from __future__ import annotations

from dataclasses import replace

from distbelief.strategies.ps.rules.pace import Pace, next_pace
from distbelief.strategies.ps.worker.asynchronous import Spent

UNCOUNTED = 2
"""The first updates open connections and map memory: they say nothing of the ones to come."""
STRETCH = 8
"""Updates, at least, from one look to the next; and as many that there are two fetches among them."""


class PaceKeeper:
    """
    >>> keeper, spent = PaceKeeper((1, 1)), Spent()
    >>> for update in range(20):
    ...     spent = Spent(spent.compute_s + 1.0, spent.fetch_s + 0.01, spent.push_s + 0.3, update + 1)
    ...     pace = keeper.look(spent)
    >>> pace
    (4, 1)
    """

    def __init__(self, pace: tuple[int, int]) -> None:
        n_push, n_fetch = pace
        self._pace = Pace(n_fetch, n_push)
        self._since: Spent | None = None

    def look(self, spent: Spent) -> tuple[int, int]:
        """`spent`: since the generation began. Returns n_push and n_fetch from now on."""
        since = self._since
        if since is None:
            if spent.updates >= UNCOUNTED:
                self._since = replace(spent)
        elif spent.updates - since.updates >= max(STRETCH, 2 * self._pace.n_fetch):
            self._pace = next_pace(
                self._pace,
                spent.compute_s - since.compute_s,
                spent.fetch_s - since.fetch_s,
                spent.push_s - since.push_s,
            )
            self._since = replace(spent)
        return self._pace.n_push, self._pace.n_fetch
