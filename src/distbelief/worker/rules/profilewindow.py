"""Which steps of a run are recorded. Pure."""

from __future__ import annotations

from distbelief.errors import JobError

WARM_UP = 10
"""Steps before the first that is recorded, where there are enough: caches fill, memory is mapped, shards settle."""
LENGTH = 10


def window(first: int, end: int, steps: int, stride: int = 1) -> tuple[int, int]:
    """The steps from the first number to before the second, of a run with so many steps; `end` 0: the usual ones.

    `stride`: steps that are committed together. There is a boundary after every multiple of it, and nowhere else.

    >>> window(0, 0, steps=500), window(0, 0, steps=6), window(0, 0, steps=100, stride=8), window(30, 50, steps=40)
    ((10, 20), (3, 6), (16, 32), (30, 40))
    """
    if not end:
        warm_up = -(-min(WARM_UP, steps // 2) // stride) * stride
        first = warm_up if warm_up < steps else 0
        end = first + max(LENGTH, 2 * stride)
    if first >= steps:
        raise JobError(
            f"the profile is to begin at step {first}, but the run ends after {steps}",
            hint=f"give --profile-steps within 0:{steps}",
        )
    return first, min(end, steps)
