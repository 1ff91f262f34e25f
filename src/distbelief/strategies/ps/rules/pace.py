"""How often a worker pushes gradients (every n_push batches, which are one update) and fetches parameters (every
n_fetch updates), from what was measured.

Communicating after every batch is best for learning, so it starts there, and becomes rarer only while the wait for
communication costs more than a share of the computing. Pure arithmetic; knows no clock.
"""

from __future__ import annotations

import math

from msgspec import Struct

from distbelief.errors import JobError

CALM = 0.7
"""Communication becomes more frequent again only if its cost would then be below this part of what is allowed.
So one noisy measurement near the limit does not switch to and fro."""


class Pace(Struct, frozen=True):
    n_fetch: int = 1
    n_push: int = 1


class Limits(Struct, frozen=True):
    share: float = 0.1
    """What fetching and pushing together may cost, as a part of the time spent computing."""
    most: int = 64
    """n_fetch and n_push are no larger than this."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.share) and self.share > 0):
            raise JobError(f"the share of communication is {self.share}", hint="Give a number above 0, such as 0.1.")
        if self.most < 1:
            raise JobError(f"at most {self.most} batches between pushes", hint="Give a number of at least 1.")


def next_pace(pace: Pace, compute_s: float, fetch_s: float, push_s: float, limits: Limits | None = None) -> Pace:
    """The pace after a stretch of batches at `pace`, in which the worker computed and waited for so many seconds.

    Seconds in which communication ran beside computing are not waited for, and do not count. Of the share that is
    allowed, fetching and pushing may have half each. Numbers are doubled or halved, one step at a time.

    >>> next_pace(Pace(), compute_s=1.0, fetch_s=0.01, push_s=0.3)
    Pace(n_fetch=1, n_push=2)
    >>> next_pace(Pace(1, 2), compute_s=1.0, fetch_s=0.01, push_s=0.04)
    Pace(n_fetch=1, n_push=2)
    >>> next_pace(Pace(1, 2), compute_s=1.0, fetch_s=0.01, push_s=0.01)
    Pace(n_fetch=1, n_push=1)
    """
    limits = limits or Limits()
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in (compute_s, fetch_s, push_s)) or compute_s == 0:
        return pace  # nothing was measured
    allowed_s = compute_s * limits.share / 2
    return Pace(
        _next(pace.n_fetch, fetch_s, allowed_s, limits.most), _next(pace.n_push, push_s, allowed_s, limits.most)
    )


def _next(every: int, waited_s: float, allowed_s: float, most: int) -> int:
    if waited_s > allowed_s:
        return min(every * 2, most)
    fewer = every // 2
    # With `fewer` batches between, the same wait comes every / fewer times as often.
    if fewer and waited_s * every / fewer < CALM * allowed_s:
        return min(fewer, most)
    return min(every, most)
