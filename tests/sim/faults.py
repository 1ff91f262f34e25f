"""Which faults a seed brings, and when. It decides; the cluster carries them out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tests.sim.network import Weather

Kind = Literal[
    "kill",
    "kill at the next change",
    "kill when it has finished",
    "freeze",
    "slow",
    "kill coordinator",
    "kill coordinator while it decides",
    "freeze coordinator",
    "scale",
    "join",
    "leave",
    "cut",
    "save",
    "bad disk",
    "full disk",
    "set clock",
    "stop",
    "kill everything",
]
WEIGHTS: dict[Kind, int] = {
    "kill": 6,
    "kill at the next change": 3,
    "kill when it has finished": 1,
    "freeze": 4,
    "slow": 2,
    "kill coordinator": 2,
    "kill coordinator while it decides": 4,
    "freeze coordinator": 1,
    "scale": 3,
    "join": 1,
    "leave": 2,
    "cut": 2,
    "save": 3,
    "bad disk": 1,
    "full disk": 2,
    "set clock": 2,
    "stop": 1,
    "kill everything": 1,
}


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: Kind
    duration_s: float
    """Of a freeze, a cut, a full disk, or a coordinator's pause; infinite: until somebody does something about it."""
    amount: int
    """How many workers are hit, or how many there should be more (or fewer)."""


def schedule(rng: random.Random, span_s: float, members: int, only: Sequence[Kind] = ()) -> list[Fault]:
    """A few faults within the span, in the order of their times; of all kinds, or `only` these. Some come in bursts."""
    kinds = list(only or WEIGHTS)
    faults: list[Fault] = []
    at_s = 0.0
    for _ in range(rng.randint(1, 9)):
        at_s = rng.uniform(0.0, span_s) if rng.random() < 0.6 else at_s + rng.uniform(0.0, 0.5)
        kind = rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        if kind == "scale":
            amount = rng.choice([-2, -1, 1, 2, max(1, members // 4), -max(1, members // 4)])
        else:
            amount = rng.choice([1, 1, 1, 1, 2, max(1, members // 2)])
        duration_s = rng.choice([0.3, 1.0, 3.0, 8.0, 20.0])
        if kind == "freeze" and rng.random() < 0.3:
            duration_s = float("inf")
        faults.append(Fault(at_s, kind, duration_s, amount))
        if kind == "kill" and rng.random() < 0.3:  # the next generation is hit before it has found its feet
            faults.append(Fault(at_s, "kill at the next change", duration_s, 1))
    return sorted(faults, key=lambda fault: fault.at_s)


def weather(rng: random.Random) -> Weather:
    latency_s = rng.choice([0.0005, 0.002, 0.05])
    if rng.random() < 0.6:
        return Weather(latency_s=latency_s)
    return Weather(
        drop=rng.choice([0.0, 0.02, 0.1]),
        double=rng.choice([0.0, 0.1]),
        late=rng.choice([0.05, 0.3]),
        late_s=rng.choice([0.2, 2.0]),
        latency_s=latency_s,
    )
