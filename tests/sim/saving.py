"""Checkpoints in virtual time: a worker's saver, and what the training thread does for it.

The saver does what worker/saving.py does, with its own thread's pauses and tries; it is frozen and dies with its
process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from distbelief.control import messages as m
from distbelief.options import SavePlan
from distbelief.worker.rules.control import Save, Seal
from distbelief.worker.rules.reports import unheard
from distbelief.worker.rules.writing import Attempts, after_failure
from distbelief.worker.saving import BUFFERS, REMEMBERED
from distbelief.worker.training import is_save_due
from tests.sim.clock import Clock
from tests.sim.storage import CannotWrite, History, IsIncomplete, IsSealed, Part, Storage

if TYPE_CHECKING:
    from tests.sim.training import Generation, Work

FOLDER = "checkpoints"


# --- the saver of one worker -----------------------------------------------------------------------------------------


class Copying:
    """A copy of some tiles that is made while training goes on: finished before they are written to."""

    def __init__(self, tiles: range, values: Callable[[int], int]) -> None:
        self.tiles: tuple[tuple[int, int], ...] = ()
        self._left = tiles
        self._values = values

    def finish(self) -> None:
        self.tiles += tuple((tile, self._values(tile)) for tile in self._left)
        self._left = range(0)


@dataclass(frozen=True)
class Snapshot:
    number: int
    part: Part
    """Without its tiles, until they are copied."""
    copying: Copying
    history: History
    last: bool


class VirtualSaver:
    def __init__(self, me: Owner, storage: Storage, every_steps: int, clock: Clock) -> None:
        self.copies = 0
        """In use."""
        self.newest = (0, 0)
        """Number and step of the last snapshot that was taken, or must be."""
        self._me = me
        self.plan = SavePlan(FOLDER, every_steps=every_steps)
        self.asked = -1
        self._storage = storage
        self._clock = clock
        self._under_way: set[int] = set()
        self._asked_to_seal: set[int] = set()
        self._sealed = 0
        self._copying: Copying | None = None
        self._written: dict[int, Snapshot] = {}
        self._waiting: deque[Iterator[float]] = deque()
        self._idle = True
        self._held = False

    # --- for others --------------------------------------------------------------------------------------------------

    def ask(self, wish: Save, present: int) -> None:
        self.asked = wish.step
        if wish.step == self._sealed:
            self._me.say(m.CheckpointSealed(self._me.number, wish.step))
        elif wish.step in self._written:
            self._tell_part(self._written[wish.step])
        elif present > wish.step and wish.step not in self._under_way:
            self._me.say(m.SaveMissed(self._me.number, wish.step))

    def miss(self, applied: int) -> None:
        """The state after so many steps is gone: nobody can save it."""
        if applied == self.asked:
            self._me.say(m.SaveMissed(self._me.number, applied))

    def skip(self, step: int) -> None:
        self._me.say(m.SaveFailed(self._me.number, step, "both copies are in use", gave_up=True))

    def expect(self, number: int, step: int) -> None:
        """Those that keep on failing make room for the last one."""
        self.newest = number, step

    def take(self, snapshot: Snapshot) -> None:
        self.copies += 1
        self._copying = snapshot.copying
        self.newest = snapshot.number, snapshot.part.step
        self._under_way.add(snapshot.part.step)
        self._do(self._write(snapshot))

    def let_go(self) -> None:
        """The generation is over: others will write to what is being copied."""
        if self._copying:
            self._copying.finish()

    def seal(self, wish: Seal) -> None:
        if wish.step not in self._asked_to_seal:
            self._asked_to_seal.add(wish.step)
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
        yield self._storage.write_s * self._me.chance()
        snapshot.copying.finish()
        part, attempts = replace(snapshot.part, tiles=snapshot.copying.tiles), Attempts()
        snapshot = replace(snapshot, part=part)
        while True:
            yield self._storage.write_s * (0.5 + self._me.chance())
            try:
                self._try(snapshot)
                break
            except (CannotWrite, IsSealed) as error:
                exists = isinstance(error, IsSealed)
                then = after_failure(attempts, exists, snapshot.number, part.step, self.newest, snapshot.last)
                if not exists:
                    self._me.say(m.SaveFailed(self._me.number, part.step, "cannot write", gave_up=then.gave_up))
                if then.over:
                    break
                attempts = then.attempts
                yield then.pause_s
        self._under_way.discard(part.step)
        self.copies -= 1

    def _try(self, snapshot: Snapshot) -> None:
        part = snapshot.part
        try:
            self._storage.write(part)
        except IsSealed:
            if part.rank > 0:
                raise
            if not self._storage.unseal_if_damaged(part.step):
                self._sealed = part.step
                self._me.say(m.CheckpointSealed(self._me.number, part.step))
                return
            self._storage.write(part)
        known = {**self._written, part.step: snapshot}
        self._written = {step: known[step] for step in sorted(known)[-REMEMBERED:]}
        self._under_way.discard(part.step)
        self._tell_part(snapshot)

    def _tell_part(self, snapshot: Snapshot) -> None:
        part = snapshot.part
        self._me.say(m.PartSaved(self._me.number, part.generation, part.step, part.told, 0.0, 0.0))

    def _seal(self, wish: Seal) -> Iterator[float]:
        yield self._storage.write_s * self._me.chance()
        self._asked_to_seal.discard(wish.step)
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
    """Have my tiles of the present state copied, without waiting for anybody; `values`: tile -> its value then."""
    saver, reference = part.me.saver, part.around.memory.reference
    if saver is None or not is_save_due(saver.plan, saver.asked, applied, reference.steps, applied - 1):
        return
    last = applied == reference.steps
    number = saver.newest[0] + 1
    if last:
        saver.expect(number, applied)
    while last and saver.copies == BUFFERS:
        yield 0.1
    if saver.copies == BUFFERS:
        saver.skip(applied)
        return
    size = part.ledger.size
    copying = Copying(range(part.rank, part.around.memory.tiles, size), values)
    part.copies.append(copying)
    kept = {one.step: one for one in unheard([history[step] for step in sorted(history) if step < applied])}
    mine = Part(applied, part.action.generation, part.rank, size)
    saver.take(Snapshot(number, mine, copying, kept, last))


def finish_copies(part: Generation) -> None:
    """Before this member writes to its tiles again."""
    while part.copies:
        part.copies.pop().finish()


def load(part: Generation) -> Generator[float, None, tuple[int, History]]:
    """What nobody has in memory any more is read from the newest checkpoint: (step, what its last steps gave)."""
    if part.me.origin is None:
        return 0, {}
    yield part.around.pace.copy_s
    step, history, skipped = part.me.origin.newest_sound()
    part.loaded = step
    part.me.say(m.CheckpointLoaded(part.me.number, step, FOLDER, skipped))
    return step, history
