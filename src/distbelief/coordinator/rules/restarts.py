"""How soon the replacement of a dead worker is started: at once, or later where workers die again and again.

How it works: every death raises a level, and time lowers it, faster in larger runs. Up to FREE deaths and one per
worker, replacements are started at once, so a lost host or a few faults cost nothing. Beyond that every further death
doubles the pause, up to LONGEST_S: each start costs the others a regroup and a part of the machine. A start that the
host's kernel has refused would be refused again at once, so such starts are slowed from the first one on.
"""

from __future__ import annotations

from dataclasses import dataclass

FREE = 5
FORGIVEN_S = 60.0
"""The time after which a death of a run of few workers does not count any more."""
LONGEST_S = 60.0
_MOST_OVER = 8.0  # by then the pause is the longest one
_CROWD = 8  # so many more workers double the deaths that are usual


@dataclass(frozen=True)
class Restarts:
    level: float = 0.0
    at: float = 0.0
    """When the level was last set."""
    next_at: float = 0.0
    """No worker is started before."""

    def died(self, now: float, target: int, *, refused: bool = False) -> Restarts:
        """A worker of a run that wants `target` of them has died. `refused`: it could not be started."""
        if refused and self.wait_s(now):
            return self  # refused together with the start that brought the present pause
        free = FREE + target
        forgiven = max(now - self.at, 0.0) / FORGIVEN_S * (1 + target / _CROWD)
        level = min(max(self.level - forgiven, 0.0) + 1, free + _MOST_OVER)
        if refused:
            level = max(level, free + 1.0)
        over = level - free
        pause_s = min(2.0 ** (over - 1), LONGEST_S) if over > 0 else 0.0
        return Restarts(level, now, now + pause_s)

    def wait_s(self, now: float) -> float:
        """How long no worker is started. A clock that was set back does not make it longer."""
        left_s = self.next_at - now
        return left_s if 0 < left_s <= LONGEST_S else 0.0
