"""The folder that checkpoints lie in, in virtual time: a file is there when it is whole, or not at all.

What it holds is compared with the fault-free run when it is sealed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distbelief.control import messages as m
from distbelief.strategies.base import Applied
from tests.sim.invariants import Invariants

History = dict[int, Applied]
"""Step -> what it gave."""


class CannotWrite(Exception):
    pass


class IsSealed(Exception):
    pass


class IsIncomplete(Exception):
    pass


@dataclass(frozen=True)
class Part:
    """One member's portion of the state after so many steps."""

    step: int
    generation: int
    rank: int
    members: int
    tiles: tuple[tuple[int, int], ...] = ()
    """(tile, its value)"""

    @property
    def told(self) -> m.WrittenPart:
        """Its checksum here says of whose it is: so that a mixture is seen where it is made."""
        return m.WrittenPart(len(self.tiles), f"{self.generation}/{self.rank}/{self.members}")


@dataclass
class Step:
    parts: dict[tuple[int, int], Part] = field(default_factory=dict)
    """(number, of how many) -> the file."""
    manifest: tuple[tuple[Part, ...], History] | None = None
    damaged: bool = False


class Storage:
    def __init__(self, invariants: Invariants, rng: random.Random, now: Callable[[], float]) -> None:
        self.steps: dict[int, Step] = {}
        self.write_s = rng.choice([0.02, 0.3, 2.0])
        self.failing = rng.choice([0.0, 0.0, 0.1])
        """How often a write fails for no reason."""
        self.bad_until = 0.0
        self._invariants = invariants
        self._rng = rng
        self._now = now

    def _check_disk(self) -> None:
        if self._now() < self.bad_until or self._rng.random() < self.failing:
            raise CannotWrite

    def write(self, part: Part) -> None:
        self._check_disk()
        there = self.steps.setdefault(part.step, Step())
        if there.manifest:
            raise IsSealed
        there.parts[part.rank + 1, part.members] = part

    def seal(self, step: int, wanted: Sequence[m.WrittenPart], history: History) -> None:
        self._check_disk()
        there = self.steps.get(step, Step())
        if there.manifest:
            return
        found = [there.parts.get((number, len(wanted))) for number in range(1, len(wanted) + 1)]
        parts = tuple(part for part in found if part)
        if len(parts) < len(wanted):
            raise IsIncomplete
        there.manifest = parts, history
        self._invariants.sealed(step, [tile for part in parts for tile in part.tiles])
        self.steps = {old: one for old, one in self.steps.items() if old >= step or one.manifest}

    def unseal_if_damaged(self, step: int) -> bool:
        there = self.steps[step]
        if there.damaged:
            there.manifest, there.damaged = None, False
        return there.manifest is None

    def sealed(self) -> list[int]:
        """Newest first."""
        return sorted((step for step, there in self.steps.items() if there.manifest), reverse=True)

    def damage_newest(self) -> None:
        """Unless it is the only one: then the run could not go on, and says so."""
        if len(self.sealed()) > 1:
            self.steps[self.sealed()[0]].damaged = True

    def newest_sound(self) -> tuple[int, History, list[tuple[int, str]]]:
        skipped = [(step, "damaged") for step in self.sealed() if self.steps[step].damaged]
        for step in self.sealed():
            there = self.steps[step]
            if there.manifest and not there.damaged:
                return step, dict(there.manifest[1]), [one for one in skipped if one[0] > step]
        return 0, {}, skipped
