"""What follows from a failed write of a snapshot: another attempt, after which pause, or none. Pure.

The simulation (tests/sim) uses this function too, so that its members save as real members do.
"""

from __future__ import annotations

from dataclasses import dataclass

RETRY_S = 1.0
LONGEST_RETRY_S = 30.0
LOOKING_S = 0.1
LAST_TRIES = 6
"""Attempts for the run's last checkpoint: half a minute, then the run ends without it."""


@dataclass(frozen=True)
class Attempts:
    """The useless attempts to write one snapshot: the failed ones, and attempts that found a checkpoint there."""

    failed: int = 0
    found: int = 0


@dataclass(frozen=True)
class AfterFailure:
    attempts: Attempts
    over: bool
    """The snapshot is no longer written."""
    gave_up: bool
    """What the report of a failure says: nobody will write a snapshot of this step."""
    pause_s: float
    """Until the next attempt."""


def after_failure(
    attempts: Attempts, exists: bool, number: int, step: int, newest: tuple[int, int], last: bool
) -> AfterFailure:
    """The write of snapshot `number`, of the state after `step` steps, has failed.

    `exists`: only because a sealed checkpoint is there already; rank 0 verifies it, and replaces a damaged one. No
    failure is reported then. `newest`: number and step of the newest snapshot. `last`: it is the run's last one.

    >>> after_failure(Attempts(failed=5), False, 3, 20, (3, 20), last=True).gave_up
    True
    >>> after_failure(Attempts(failed=2), False, 3, 20, (3, 20), last=False).pause_s
    4.0
    """
    first_s, before = (LOOKING_S, attempts.found) if exists else (RETRY_S, attempts.failed)
    attempts = Attempts(attempts.failed + (not exists), attempts.found + exists)
    replaced = newest[0] > number
    over = replaced or (last and attempts.failed >= LAST_TRIES)
    again = replaced and newest[1] == step  # another generation took a snapshot of the same step
    pause_s = min(first_s * 2.0 ** min(before, 16), LONGEST_RETRY_S)
    return AfterFailure(attempts, over, over and not again, pause_s)
