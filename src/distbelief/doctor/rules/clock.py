"""Computes how far the clocks of two hosts are apart, from questions and answers. Pure.

As in NTP: the other host answers in the middle of the round trip, with an error of at most half of it. The shortest
round trip has the smallest error.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from distbelief.doctor.rules.report import Finding, duration, ok, problem

MOST_S = 1.0
"""Seconds. Training compares no clocks across hosts, but log readers, certificates and S3 do."""


class ClockSample(Struct, frozen=True):
    """One question and its answer, by the clock of the asking host; `told` is the other host's clock."""

    asked: float
    told: float
    heard: float


class Skew(Struct, frozen=True):
    ahead_s: float
    """How far this host's clock is ahead of the other."""
    within_s: float
    """The error of `ahead_s`."""
    round_trip_s: float


def skew(samples: Sequence[ClockSample]) -> Skew:
    """The skew by the shortest of the samples.

    >>> skew([ClockSample(asked=105.0, told=100.5, heard=106.0), ClockSample(asked=205.0, told=200.05, heard=205.1)])
    Skew(ahead_s=5.0, within_s=0.05, round_trip_s=0.1)
    """
    best = min(samples, key=lambda one: one.heard - one.asked)
    trip = round(best.heard - best.asked, 9)
    return Skew(round((best.asked + best.heard) / 2 - best.told, 9), trip / 2, trip)


def judge(skews: dict[str, Skew], reference: str) -> Finding:
    """`skews`: each other host's clock, compared with the reference host's."""
    about = "clocks"
    off = {host: one for host, one in skews.items() if abs(one.ahead_s) - one.within_s > MOST_S}
    if off:
        told = [
            f"{host} is {duration(abs(one.ahead_s))} {'ahead of' if one.ahead_s > 0 else 'behind'} {reference}"
            for host, one in off.items()
        ]
        return problem(
            about, "; ".join(told), f"set the clock there: start chrony or systemd-timesyncd on {' and '.join(off)}"
        )
    most = max((abs(one.ahead_s) + one.within_s for one in skews.values()), default=0.0)
    return ok(about, f"at most {duration(most)} apart from {reference}")
