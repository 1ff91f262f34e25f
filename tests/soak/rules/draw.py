"""Which faults strike, in which order: a function of the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

TOGETHER = 0.25
"""How often a second fault strikes right after the first, before the run has recovered."""


def rounds(seed: int, kinds: Sequence[str], alone: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """What strikes at the same time, without end: each kind once before any strikes again. Kinds in `alone` never
    strike together with another one.

    >>> first = rounds(3, ["a", "b", "c", "d"], ["d"])
    >>> [next(first) for _ in range(3)] == [next(again) for again in [rounds(3, ["a", "b", "c", "d"], ["d"])] * 3]
    True
    """
    dice = random.Random(seed)
    while True:
        left = dice.sample(kinds, len(kinds))
        while left:
            chosen = [left.pop()]
            partners = [kind for kind in left if kind not in alone]
            if chosen[0] not in alone and partners and dice.random() < TOGETHER:
                chosen.append(partners[-1])
                left.remove(partners[-1])
            yield tuple(chosen)
