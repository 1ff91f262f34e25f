"""How often a worker pushes gradients and pulls parameters: the pace that `adaptive` chooses from measurements. Pure.

A worker pushes every n_push batches, which are one update, and pulls every n_fetch updates. Communication after every
batch is best for learning. So the pace starts there, and communication becomes rarer only while it costs more than a
share of the computing time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from msgspec import Struct

SHARE = 0.1
"""The allowed time of pulls and pushes together, as a part of the computing time."""
MOST = 64
"""The largest n_fetch and n_push."""
CALM = 0.7
"""Communication becomes more frequent again only if its cost would then be below this part of the allowed share. So one
noisy measurement near the limit does not switch to and fro."""


class Pace(Struct, frozen=True):
    n_fetch: int = 1
    n_push: int = 1


def next_pace(pace: Pace, compute_s: float, fetch_s: float, push_s: float) -> Pace:
    """The pace after a stretch of updates at `pace`, in which the worker computed and waited for these seconds.

    Pulls and pushes may have half of the allowed share each. Each number is kept, doubled or halved.

    >>> next_pace(Pace(), compute_s=1.0, fetch_s=0.01, push_s=0.3)
    Pace(n_fetch=1, n_push=2)
    >>> next_pace(Pace(1, 2), compute_s=1.0, fetch_s=0.01, push_s=0.04)
    Pace(n_fetch=1, n_push=2)
    >>> next_pace(Pace(1, 2), compute_s=1.0, fetch_s=0.01, push_s=0.01)
    Pace(n_fetch=1, n_push=1)
    """
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in (compute_s, fetch_s, push_s)) or compute_s == 0:
        return pace  # nothing could be measured
    allowed_s = compute_s * SHARE / 2
    return Pace(_next(pace.n_fetch, fetch_s, allowed_s), _next(pace.n_push, push_s, allowed_s))


def _next(every: int, waited_s: float, allowed_s: float) -> int:
    if waited_s > allowed_s:
        return min(every * 2, MOST)
    fewer = every // 2
    # With `fewer` batches between, the same wait comes every / fewer times as often.
    if fewer and waited_s * every / fewer < CALM * allowed_s:
        return min(fewer, MOST)
    return min(every, MOST)


UNCOUNTED = 2
"""The first updates open connections and map memory, so they are not measured."""
STRETCH = 8
"""The least number of updates between two decisions; there are also two pulls between them."""


@dataclass
class TimeSpent:
    """The seconds that a worker has waited or computed. Communication beside computing does not count."""

    compute_s: float = 0.0
    fetch_s: float = 0.0
    push_s: float = 0.0
    """Pushes and requests for leases; each push has one request."""
    updates: int = 0


class PaceKeeper:
    """Decides about the pace after every stretch of updates.

    >>> keeper, spent = PaceKeeper((1, 1)), TimeSpent()
    >>> for update in range(20):
    ...     spent = TimeSpent(spent.compute_s + 1.0, spent.fetch_s + 0.01, spent.push_s + 0.3, update + 1)
    ...     pace = keeper.look(spent)
    >>> pace
    (4, 1)
    """

    def __init__(self, pace: tuple[int, int]) -> None:
        n_push, n_fetch = pace
        self._pace = Pace(n_fetch, n_push)
        self._since: TimeSpent | None = None

    def look(self, spent: TimeSpent) -> tuple[int, int]:
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
