"""A clock that nobody can set: what all decisions, and the times in a run's records, are read from.

It shows the time that the machine's clock had when the process started, plus the time since then on the monotonic
clock. So it never jumps: neither a deadline nor the order of records changes when the machine's clock is set by hours.
Forked processes go on with their parent's clock; a process that replaces another one is given the offset
(`continue_from`). Differences to another host's clock say nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class SteadyClock:
    """`wall`: the machine's clock, read once. `monotonic`: read each time."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self.offset_s = wall() - monotonic()

    def now(self) -> float:
        return self.offset_s + self._monotonic()

    def continue_from(self, offset_s: float) -> None:
        """Show from now on what the clock with this offset shows, on the same machine."""
        self.offset_s = offset_s


CLOCK = SteadyClock()
"""This process's clock."""
