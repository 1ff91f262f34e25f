"""What a seed stands for: how large a cluster, which job, how it saves. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Setting:
    members: int
    shards: int
    steps: int
    tiles: int
    transport: Any
    span_s: float
    beat_s: float
    min_workers: int
    saves: bool
    save_every: int
    """Steps; 0: not by steps."""
    save_every_s: float

    @property
    def save_every_text(self) -> str:
        """As the option `save_every`. Members of the simulation count steps by themselves."""
        if not self.saves:
            return "never"
        return f"{self.save_every_s}s" if self.save_every_s else "end"


def setting(rng: random.Random, members: int | None) -> Setting:
    small = members is None
    count = rng.choice([1, 2, 2, 3, 3, 4, 5, 8]) if members is None else members
    huge = count > 1000
    shards = count + rng.randint(0, count) if small or not huge else count + rng.randint(0, 64)
    return Setting(
        members=count,
        shards=shards,
        steps=rng.randint(6, 20) if small else (4 if huge else rng.randint(5, 10)),
        tiles=rng.choice([1, 3, 8]),
        transport=rng.choice(["shm", "shm", "gloo"]),
        span_s=rng.choice([4.0, 12.0, 25.0]),
        beat_s=rng.choice([0.2, 0.5]) if small else (4.0 if huge else 1.0),
        min_workers=1 if rng.random() < 0.8 else rng.randint(1, min(count, 3)),
        saves=rng.random() < 0.75,
        save_every=rng.choice([0, 0, 1, 2, 5]),
        save_every_s=rng.choice([0.0, 1.0, 5.0]),
    )
