"""Random schedules: the same seed gives the same text. Pure; it does not judge whether a run survives them."""

from __future__ import annotations

import random

from distbelief.chaos.rules.schedule import KINDS, WORKER_FAULTS, Fault, When, write

FEWEST, MOST = 3, 6
SHORTEST_S, LONGEST_S = 0.1, 2.0
LAST_PART = 0.8
"""No fault is planned in the last fifth of a run: the run would often end before its answer to the fault."""


def random_schedule(seed: int, workers: int, steps: int, servers: int = 0, readers: int = 0) -> str:
    """A few faults of any kind, spread over the run, as a schedule's text. A single parameter server is never killed:
    no other server has its data. `readers`: the reader processes of a worker. No clock is set.

    >>> random_schedule(1, 4, 100) == random_schedule(1, 4, 100)
    True
    """
    dice = random.Random(seed)
    number = dice.randint(FEWEST, MOST)
    # Each kind at most once before any repeats, so that a few schedules cover all kinds.
    impossible = {"kill server"} if servers < 2 else set()
    impossible |= {"kill reader"} if readers == 0 else set()
    impossible |= {"set clock"}  # few machines have libfaketime
    possible = [kind for kind in KINDS if kind not in impossible]
    kinds = dice.sample(possible, k=len(possible))[:number]
    last = max(1, int(steps * LAST_PART))
    places = sorted(dice.randint(1, last) for _ in kinds)
    return write(tuple(_fault(dice, kind, workers, step) for kind, step in zip(kinds, places, strict=True)))


def _fault(dice: random.Random, kind: str, workers: int, step: int) -> Fault:
    numbered = kind in WORKER_FAULTS and dice.random() < 0.5
    return Fault(
        kind,
        worker=dice.randrange(workers) if numbered else None,
        when=When(step),
        for_s=round(dice.uniform(SHORTEST_S, LONGEST_S), 1) if kind in ("freeze worker", "cut worker") else None,
        factor=float(dice.randint(2, 5)) if kind == "slow worker" else 1.0,
        # With one worker left, no other worker could take over after the next kill.
        count=dice.randint(2, max(2, workers + 1)) if kind == "scale" else 0,
    )
