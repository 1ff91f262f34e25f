"""What a member reports of applied steps, what it repeats, and what a checkpoint keeps of it. Pure.

The simulation (tests/sim) uses these functions too, so that its members report what real members do.
"""

from __future__ import annotations

from collections.abc import Sequence

from distbelief.control.messages import StepReport
from distbelief.strategies.base import Applied

HEARD_AFTER_S = 2.0
"""Upper bound in seconds: a step's result is in the metrics file long before."""


def report_of(one: Applied) -> StepReport:
    """The report of a step, the first one or a repetition.

    It carries the generation in which the step was applied, never the reporter's: the coordinator forgets the partial
    sums of all earlier generations (`committed_in`), and the step after a repeated one may still need them.
    """
    return StepReport(one.step, one.loss, one.samples, one.fingerprint, one.at, one.generation)


def first_to_repeat(reported: int, applied: int) -> int:
    """The step from which on a new generation's first member repeats reports, when the coordinator has those of all
    steps before `reported`. That number may be from before a rollback to `applied` steps: then all are repeated.

    >>> first_to_repeat(7, 9), first_to_repeat(9, 7)
    (7, 0)
    """
    return reported if reported <= applied else 0


def unheard(history: Sequence[Applied]) -> tuple[Applied, ...]:
    """The last results of a history, which a coordinator that died may not have recorded; the last one is among them.

    Only times of one generation are compared: another generation's were read from another member's clock.
    """
    since_s = 0.0
    for number in range(len(history) - 1, 0, -1):
        earlier, later = history[number - 1], history[number]
        if earlier.generation == later.generation:
            since_s += max(0.0, later.at - earlier.at)
        if since_s >= HEARD_AFTER_S:
            return tuple(history[number:])
    return tuple(history)
