"""Decides when the leading process kills a silent coordinator, and when it stops restarting a process that dies again
and again. Pure; takes the time."""

from __future__ import annotations

SILENT_S = 10.0
"""A coordinator that serves and has not answered for this long is killed, and another one takes over."""
HOPELESS_S = 300.0
"""If no coordinator has answered for this long, the run ends: without one, members end after this time too."""
LOOK_S = 1.0
"""A longer time between two looks counts as this: we were stopped (Ctrl-Z, a debugger), perhaps the coordinator too."""
SHORT_LIFE_S = 2.0
"""A process that ends by itself within this time would do so again."""
MOST_SHORT_LIVES = 5


class Silence:
    """How long the coordinator has been silent while this process was running.

    >>> silence = Silence(now=0.0)
    >>> silence.is_too_long(0.5, answered_at=0.4), silence.is_too_long(84.0, answered_at=0.4)  # we were stopped
    (False, False)
    >>> [now for now in range(85, 100) if silence.is_too_long(float(now), answered_at=0.4)][0]
    94
    >>> for now in range(100, 500):  # other coordinators are started, and none answers
    ...     if silence.is_too_long(float(now), answered_at=0.4): silence.begin()
    >>> silence.is_hopeless
    True
    """

    def __init__(self, now: float) -> None:
        self._looked_at = self._answered_at = now
        self._unheard_s = 0.0
        self._alone_s = 0.0

    def is_too_long(self, now: float, answered_at: float) -> bool:
        """The caller asks several times a second."""
        gap_s, self._looked_at = now - self._looked_at, now
        self._unheard_s += min(gap_s, LOOK_S)
        self._alone_s += min(gap_s, LOOK_S)
        if answered_at > self._answered_at:
            self._answered_at, self._unheard_s, self._alone_s = answered_at, 0.0, 0.0
        return self._unheard_s > SILENT_S

    @property
    def is_hopeless(self) -> bool:
        return self._alone_s > HOPELESS_S

    def begin(self) -> None:
        """Another coordinator starts: the whole time begins again."""
        self._unheard_s = 0.0


class ShortLives:
    """How often in a row a process has died soon after its start.

    >>> lives = ShortLives()
    >>> [lives.died(lived_s=0.5, was_killed=False) for _ in range(5)]
    [False, False, False, False, True]
    """

    def __init__(self) -> None:
        self.count = 0

    def died(self, lived_s: float, was_killed: bool) -> bool:
        """Returns whether to give up. `was_killed`: by SIGKILL, which is no fault of the process."""
        if not was_killed:
            self.count = self.count + 1 if lived_s < SHORT_LIFE_S else 0
        return self.count >= MOST_SHORT_LIVES
