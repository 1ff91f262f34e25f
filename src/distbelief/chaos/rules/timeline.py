"""Which faults are due, from how far a run has come. Pure: the step and the time arrive as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from distbelief.chaos.rules.schedule import Fault


@dataclass(frozen=True)
class Pending:
    """A fault, and the step or second at which it comes next; None when it will not come again."""

    fault: Fault
    next: float | None
    times: int = 0
    """How often it came due."""


def begin(faults: Sequence[Fault]) -> tuple[Pending, ...]:
    return tuple(Pending(fault, fault.when.amount) for fault in faults)


def due(pending: Sequence[Pending], step: int, elapsed_s: float) -> tuple[tuple[Pending, ...], list[Fault]]:
    """What has come due after `step` committed steps and `elapsed_s` seconds, and what is pending after that.

    A run is seen in leaps (metrics are written several times a second), so a fault that repeats comes once per look:
    those that were leapt over would all hit the same moment.
    """
    after: list[Pending] = []
    found: list[Fault] = []
    for one in pending:
        now = step if one.fault.when.unit == "step" else elapsed_s
        if one.next is None or now < one.next:
            after.append(one)
            continue
        found.append(one.fault)
        period = one.fault.when.amount
        following = (now // period + 1) * period if one.fault.when.every else None
        after.append(replace(one, next=following, times=one.times + 1))
    return tuple(after), found


def never_due(pending: Sequence[Pending]) -> list[Fault]:
    """The faults whose time had not come when the run ended."""
    return [one.fault for one in pending if one.times == 0]
