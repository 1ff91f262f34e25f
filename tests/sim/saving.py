"""Checkpoints in virtual time: a worker's saver, and the folder that its parts and manifests lie in.

The saver does what worker/saving.py does, with its own thread's pauses and tries; it is frozen and dies with its
process. The folder shows a file when it is whole. What it holds is compared with the fault-free run when it is sealed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from distbelief.comm import messages as m
from distbelief.worker.control import Save, Seal
from distbelief.worker.saving import BUFFERS, LAST_TRIES, LONGEST_RETRY_S, REMEMBERED, RETRY_S
from sim.clock import Clock
from sim.invariants import Invariants

if TYPE_CHECKING:
    from sim.training import Generation, Work

FOLDER = "checkpoints"
HEARD_AFTER_S = 10.0
History = dict[int, tuple[str, float]]


class CannotWrite(Exception):
    pass


class IsSealed(Exception):
    pass


class IsIncomplete(Exception):
    pass


# --- the folder ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One member's portion of the state after so many steps."""

    step: int
    generation: int
    rank: int
    members: int
    tiles: tuple[tuple[int, int], ...]
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


# --- the saver of one worker -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    number: int
    part: Part
    history: History
    last: bool


class VirtualSaver:
    def __init__(self, me: Owner, storage: Storage, every_steps: int, clock: Clock) -> None:
        self.copies = 0
        """In use."""
        self.newest = 0
        """The number of the last snapshot that was taken, or must be."""
        self._me = me
        self._storage = storage
        self._every = every_steps
        self._clock = clock
        self._asked = -1
        self._taken = 0
        self._sealed = 0
        self._written: dict[int, Snapshot] = {}
        self._waiting: deque[Iterator[float]] = deque()
        self._idle = True
        self._held = False

    # --- for others --------------------------------------------------------------------------------------------------

    def is_due(self, applied: int, steps: int) -> bool:
        return applied in (steps, self._asked) or bool(self._every and applied % self._every == 0)

    def ask(self, wish: Save, present: int) -> None:
        self._asked = wish.step
        if wish.step == self._sealed:
            self._me.say(m.CheckpointSealed(self._me.number, wish.step))
        elif wish.step in self._written:
            self._tell_part(self._written[wish.step])
        elif present > wish.step and self._taken != wish.step:
            self._me.say(m.SaveMissed(self._me.number, wish.step))

    def skip(self, step: int) -> None:
        self._me.say(m.SaveFailed(self._me.number, step, "both copies are in use", gave_up=True))

    def take(self, snapshot: Snapshot) -> None:
        self.copies += 1
        self.newest = snapshot.number
        self._taken = snapshot.part.step
        self._do(self._write(snapshot))

    def seal(self, wish: Seal) -> None:
        self._do(self._seal(wish))

    def thawed(self) -> None:
        if self._held:
            self._held = False
            self._clock.after(0.01, self._go_on)

    # --- its thread --------------------------------------------------------------------------------------------------

    def _do(self, task: Iterator[float]) -> None:
        self._waiting.append(task)
        if self._idle:
            self._idle = False
            self._clock.after(0.0, self._go_on)

    def _go_on(self) -> None:
        if not self._me.alive:
            return
        if self._me.frozen:
            self._held = True
            return
        while self._waiting:
            try:
                delay_s = next(self._waiting[0])
            except StopIteration:
                self._waiting.popleft()
                continue
            self._clock.after(delay_s * self._me.slowness, self._go_on)
            return
        self._idle = True

    def _write(self, snapshot: Snapshot) -> Iterator[float]:
        part, tries, pause_s, done = snapshot.part, 0, RETRY_S, False
        while not done:
            yield self._storage.write_s * (0.5 + self._me.chance())
            try:
                done = self._try(snapshot)
            except (CannotWrite, IsSealed) as error:
                tries += 1
                gave_up = self.newest > snapshot.number or (snapshot.last and tries >= LAST_TRIES)
                if isinstance(error, CannotWrite):
                    self._me.say(m.SaveFailed(self._me.number, part.step, "cannot write", gave_up=gave_up))
                if gave_up:
                    break
                yield pause_s
                pause_s = min(2 * pause_s, LONGEST_RETRY_S)
        self.copies -= 1

    def _try(self, snapshot: Snapshot) -> bool:
        part = snapshot.part
        try:
            self._storage.write(part)
        except IsSealed:
            if part.rank > 0:
                raise
            if not self._storage.unseal_if_damaged(part.step):
                self._sealed = part.step
                self._me.say(m.CheckpointSealed(self._me.number, part.step))
                return True
            self._storage.write(part)
        known = {**self._written, part.step: snapshot}
        self._written = {step: known[step] for step in sorted(known)[-REMEMBERED:]}
        self._tell_part(snapshot)
        return True

    def _tell_part(self, snapshot: Snapshot) -> None:
        part = snapshot.part
        self._me.say(m.PartSaved(self._me.number, part.generation, part.step, part.told, 0.0, 0.0))

    def _seal(self, wish: Seal) -> Iterator[float]:
        yield self._storage.write_s * self._me.chance()
        snapshot = self._written.get(wish.step)
        if wish.step != self._sealed:
            if snapshot is None or snapshot.part.members != len(wish.parts):
                return
            try:
                self._storage.seal(wish.step, wish.parts, snapshot.history)
            except (CannotWrite, IsIncomplete) as error:
                gave_up = isinstance(error, IsIncomplete)
                self._me.say(m.SaveFailed(self._me.number, wish.step, "cannot seal", gave_up=gave_up))
                return
            self._sealed = wish.step
            self._written = {step: kept for step, kept in self._written.items() if step > wish.step}
        yield 0.01
        self._me.say(m.CheckpointSealed(self._me.number, wish.step))


class Owner(Protocol):
    """What a saver knows of the process that it lives in."""

    number: int
    alive: bool
    frozen: bool
    slowness: float

    def say(self, event: m.Event) -> None: ...
    def chance(self) -> float: ...


# --- in the training thread ------------------------------------------------------------------------------------------


def save_if_due(part: Generation, applied: int, values: Callable[[int], int], history: History) -> Work:
    """Copy my tiles of the present state, without waiting for anybody else; `values`: tile -> its value now."""
    saver, reference = part.me.saver, part.around.memory.reference
    if saver is None or not saver.is_due(applied, reference.steps):
        return
    last = applied == reference.steps
    number = saver.newest + 1
    if last:
        saver.newest = number
    while last and saver.copies == BUFFERS:
        yield 0.1
    if saver.copies == BUFFERS:
        saver.skip(applied)
        return
    yield part.around.pace.tile_s * part.around.rng.random()
    size = part.ledger.size
    tiles = tuple((tile, values(tile)) for tile in range(part.rank, part.around.memory.tiles, size))
    newest_s = max((at for _, at in history.values()), default=0.0)
    unheard = {step: one for step, one in history.items() if one[1] > newest_s - HEARD_AFTER_S and step < applied}
    saver.take(Snapshot(number, Part(applied, part.action.generation, part.rank, size, tiles), unheard, last))


def load(part: Generation) -> Generator[float, None, tuple[int, History]]:
    """What nobody has in memory any more is read from the newest checkpoint: (step, what its last steps gave)."""
    if part.me.origin is None:
        return 0, {}
    yield part.around.pace.copy_s
    step, history, skipped = part.me.origin.newest_sound()
    part.me.say(m.CheckpointLoaded(part.me.number, step, FOLDER, skipped))
    return step, history
