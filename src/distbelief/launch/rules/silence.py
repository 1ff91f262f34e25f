"""How long the coordinator has been silent while we were there to hear it. Pure; time arrives as an argument."""

from __future__ import annotations

SILENT_S = 10.0
"""A coordinator that does not answer for so long is ended, and another one takes over."""
LOOK_S = 1.0
"""A longer time between two looks counts as this: we stood still (Ctrl-Z, a debugger), and it may have, too."""


class Silence:
    """
    >>> silence = Silence(now=0.0)
    >>> silence.is_too_long(0.5, answered_at=0.4), silence.is_too_long(84.0, answered_at=0.4)  # we were stopped
    (False, False)
    >>> [now for now in range(85, 100) if silence.is_too_long(float(now), answered_at=0.4)][0]
    94
    """

    def __init__(self, now: float) -> None:
        self._looked_at = self._answered_at = now
        self._unheard_s = 0.0

    def is_too_long(self, now: float, answered_at: float) -> bool:
        """To be asked several times a second."""
        gap_s, self._looked_at = now - self._looked_at, now
        self._unheard_s += min(gap_s, LOOK_S)
        if answered_at > self._answered_at:
            self._answered_at, self._unheard_s = answered_at, 0.0
        return self._unheard_s > SILENT_S

    def begin(self) -> None:
        """Another coordinator is on its way: it has its whole time."""
        self._unheard_s = 0.0
