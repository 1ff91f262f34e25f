"""One clock for the workers of several hosts. Pure.

Workers of one host have one clock. Between hosts, members that do steps together meet once in each: all of them go on
from there at the same moment, give or take a message. So the differences of those moments, by each host's own clock,
are how far the clocks are apart; the median of them ignores a message that was late.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from distbelief.observe.profiling.parts import Part

WAIT = "wait"


def ahead(parts: Sequence[Part]) -> dict[str, int | None]:
    """By how many nanoseconds each host's clock is ahead of the first part's host; None: there is no telling."""
    if not parts:
        return {}
    reference = parts[0].host
    meetings = {part.name: _meetings(part) for part in parts}
    told: dict[str, int | None] = {}
    for host in dict.fromkeys(part.host for part in parts):
        differences = [
            theirs - meetings[mine.name][step]
            for mine in parts
            if mine.host == reference
            for other in parts
            if other.host == host
            for step, theirs in meetings[other.name].items()
            if step in meetings[mine.name]
        ]
        told[host] = 0 if host == reference else round(statistics.median(differences)) if differences else None
    return told


def _meetings(part: Part) -> dict[str, int]:
    """Step -> when the last wait in it was over."""
    ends = sorted(
        start + took for phase, start, took, _, thread in part.spans if phase == WAIT and thread == part.thread
    )
    found = {}
    for phase, start, took, _, _ in part.spans:
        if phase.startswith("step "):
            inside = [end for end in ends if start <= end <= start + took]
            if inside:
                found[phase] = inside[-1] + part.since_ns
    return found
