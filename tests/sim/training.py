"""What a member's training thread does in a generation, as a generator over virtual time.

It yields how long something takes (a number of seconds), or what it waits for (a Wait); whoever drives it may throw
Aborted into a wait, and may stop for ever between any two yields. The order of every write is that of
strategies/dataparallel/replica.py over transport/shm/exchange.py (`together`) or transport/gloo/exchange.py (`apart`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from distbelief.control import messages as m
from distbelief.steadyclock import SteadyClock
from distbelief.strategies.base import Applied
from distbelief.worker.rules.control import TrainGeneration
from distbelief.worker.rules.reports import first_to_repeat, report_of
from tests.sim.invariants import Broken, Invariants
from tests.sim.memory import TORN, Key, Ledger, Past, Plan, SharedMemory, add_up, takeover
from tests.sim.reference import add, gradient, row
from tests.sim.saving import Copying, VirtualSaver, finish_copies, load, save_if_due
from tests.sim.storage import History, Storage

Work = Iterator["float | Wait"]
LOOK = -1.0
"""Takes no time: look whether the work was aborted."""


@dataclass(frozen=True)
class Wait:
    """Until every member of the ledger has announced it."""

    ledger: Ledger
    key: Key


@dataclass
class OwnState:
    """A replica of one's own."""

    initialised: bool = False
    applied: int = 0
    history: History = field(default_factory=dict)


@dataclass(frozen=True)
class Pace:
    """How long things take, in virtual seconds."""

    shard_s: float
    tile_s: float
    join_s: float = 0.02
    copy_s: float = 0.5


@dataclass(frozen=True)
class Surroundings:
    """What all members have in common."""

    memory: SharedMemory
    invariants: Invariants
    pace: Pace
    rng: random.Random
    released: Callable[[Ledger, Key], None]
    """Everybody has announced it: wake who waits for it."""


class Member(Protocol):
    """The process around the training thread."""

    number: int
    step: int
    busy_s: float
    computed: int
    reports: list[m.StepReport]
    recall: Callable[[int], None]
    own: OwnState
    clock: SteadyClock
    saver: VirtualSaver | None
    origin: Storage | None
    """Where it looks for a checkpoint when nobody has the run's state."""

    def say(self, event: m.Event) -> None: ...
    def all_heard_of(self, members: Sequence[m.Member]) -> int:
        """The newest generation that the control threads of all these know of."""
        ...


class Generation:
    """One member's part in one generation."""

    def __init__(self, around: Surroundings, me: Member, action: TrainGeneration) -> None:
        self.around = around
        self.me = me
        self.action = action
        self.rank = action.rank
        self.leads = action.rank == 0
        self.ledger = around.memory.ledger(action)
        self.past = Past()
        self.plan: tuple[int, Plan] | None = None
        self.copies: list[Copying] = []
        self.loaded = 0
        """The step of the checkpoint that this member has loaded."""
        me.busy_s, me.computed = 0.0, 0

    def writes(self, what: str, step: int) -> None:
        """Where a state is shared, nobody of an older generation may; a replica of one's own harms nobody."""
        if self.action.transport == "shm":
            self.around.invariants.writes(self.me.number, self.action.generation, what, step)

    def announce(self, word: str, value: int) -> Wait:
        key = word, value
        if self.ledger.announce(self.rank, key):
            if key == ("meet", 1):
                self.around.invariants.all_met(self.action.generation)
            self.around.invariants.goes_on(self.action.generation, word)
            self.around.released(self.ledger, key)
        return Wait(self.ledger, key)

    # --- computing and adding up -------------------------------------------------------------------------------------

    def plan_of(self, step: int, occupied: int) -> Plan:
        if self.plan and self.plan[0] == step:
            return self.plan[1]
        return self.ledger.plan(occupied)

    def plan_takeover(self, step: int) -> Plan | None:
        """Once for all members: they see the same past."""
        taken = self.ledger.taken
        if step not in taken:
            held = self.past.held(step)
            taken[step] = (
                None if held is None else takeover(self.ledger, self.around.memory.reference.occupied[step], held)
            )
        return taken[step]

    def compute(self, step: int, plan: Plan) -> Work:
        ledger, rank = self.ledger, self.rank
        if ledger.size == 1:
            yield LOOK  # who is alone never waits for anybody, and would notice no abort anywhere else
        self.writes("begins a step", step)
        self.around.invariants.begins(
            self.me.number, self.action.generation, self.me.all_heard_of(self.action.members), step
        )
        ledger.begun[rank] = step + 1
        for unit in plan.everybody[rank].work:
            self.writes("computes a shard", step)
            ledger.working[rank] = unit.shard + 1
            state = self.state_before(step)
            touched = [unit.slot, *(into for into, _ in unit.additions)]
            before = {slot: ledger.slots.get((rank, slot), TORN) for slot in touched}
            for slot in touched:
                ledger.slots[rank, slot] = TORN
            took_s = self.around.pace.shard_s * (0.8 + 0.4 * self.around.rng.random())
            yield took_s
            self.writes("writes a partial sum", step)
            before[unit.slot] = gradient(step, unit.shard, state)
            for into, other in unit.additions:
                before[into] = add(before[into], before.get(other, ledger.slots.get((rank, other), TORN)))
            for slot, value in before.items():
                ledger.slots[rank, slot] = value
            ledger.rows[unit.shard] = row(step, unit.shard, state)
            ledger.working[rank] = 0
            self.me.busy_s += took_s
            self.me.computed += 1
        ledger.nodes[rank] = list(plan.everybody[rank].results.items())

    def state_before(self, step: int) -> int:
        memory = self.around.memory
        if self.action.transport == "shm":
            return hash(tuple(memory.values))
        return hash(memory.reference.states[self.me.own.applied])

    def add_up(self, step: int, plan: Plan) -> int:
        """Once for all members: they all read the same memory, and nobody writes there until all are through."""
        sums = self.ledger.sums
        if step not in sums:
            occupied = self.around.memory.reference.occupied[step]
            sums[step], counted = add_up(self.ledger, self.past, plan, step, occupied)
            found = sums[step]
            self.around.invariants.summed(step, self.action.generation, found.total, found.fingerprint, counted)
        return sums[step].total

    def finish_step(self, step: int, history: History) -> None:
        self.me.step = step + 1
        if self.leads:
            self.me.reports.append(report_of(replace(history[step], generation=self.action.generation)))

    def applied(self, step: int) -> Applied:
        samples, found = self.around.memory.reference.samples(step), self.ledger.sums[step]
        return Applied(step, 0.0, samples, found.fingerprint, self.action.generation, self.me.clock.now())

    def sealed(self, applied: int) -> int:
        """What is saved; what the first generation of all finds is what was loaded, if anything."""
        return max(self.action.sealed, self.loaded) if self.action.past else applied

    def recall_from(self, history: History, applied: Callable[[], int]) -> None:
        def recall(reported: int) -> None:
            steps = range(reported, applied())
            self.me.reports.extend(report_of(history[step]) for step in steps if step in history)

        self.me.recall = recall
        recall(first_to_repeat(self.action.reported, applied()))

    def finished(self, digest: str) -> m.WorkerFinished:
        steps = self.around.memory.reference.steps
        return m.WorkerFinished(self.me.number, self.action.generation, steps, weights_sha256=digest)


def train(around: Surroundings, me: Member, action: TrainGeneration) -> Work:
    yield from (together if action.transport == "shm" else apart)(Generation(around, me, action))


# --- one state for all -----------------------------------------------------------------------------------------------


def together(part: Generation) -> Work:
    around, memory, me = part.around, part.around.memory, part.me
    yield around.pace.join_s * around.rng.random()
    yield part.announce("meet", 1)
    if part.leads:
        part.writes("repairs the state", memory.steps_applied)
        yield around.pace.tile_s
        part.writes("repairs the state", memory.steps_applied)
        if memory.initialised:
            memory.repair(part.action.generation)
        else:
            saved = yield from load(part)
            part.writes("loads a checkpoint", saved[0])
            memory.begin_at(*saved, part.action.generation)
    yield part.announce("meet", 2)
    # Not before: until all have met, some may still be making, or writing in, the ledger of an earlier generation.
    found = {back: memory.ledgers.get(one.generation) for back, one in enumerate(part.action.past, 1)}
    part.past = Past({back: ledger for back, ledger in found.items() if ledger})
    me.step = applied = memory.steps_applied
    steps = memory.reference.steps
    plan = part.plan_takeover(applied) if applied < steps else None
    part.plan = (applied, plan) if plan else None
    in_part = memory.is_applied_in_part
    if in_part and (plan is None or plan.recomputed):
        raise Broken(f"step {applied} is applied in part, and what would finish it is gone")
    if part.leads:
        _tell_of_takeover(part, applied)
        part.recall_from(memory.history, lambda: memory.steps_applied)
    if in_part and me.saver:
        me.saver.miss(applied)
    elif applied > part.sealed(applied):
        yield from save_if_due(part, applied, memory.values.__getitem__, memory.history)
    for step in range(applied, steps):
        plan = part.plan_of(step, memory.reference.occupied[step])
        yield from part.compute(step, plan)
        part.writes("publishes", step)
        part.ledger.arrived[part.rank] = step + 1
        yield part.announce("arrived", step)
        total = part.add_up(step, plan)
        if part.leads and not memory.has(0, step):
            memory.history[step] = part.applied(step)
        finish_copies(part)
        for tile in range(part.rank, memory.tiles, part.ledger.size):
            if memory.has(tile, step):
                continue
            part.writes("opens a tile", step)
            memory.open(tile, step, part.rank)
            yield around.pace.tile_s * (0.5 + around.rng.random())
            part.writes("closes a tile", step)
            memory.close(tile, step, part.rank, total, part.action.generation)
        yield part.announce("settled", step)
        if part.leads and part.past.ledgers:
            for one in part.action.past:
                memory.ledgers.pop(one.generation, None)
        part.past = Past()
        part.finish_step(step, memory.history)
        yield from save_if_due(part, step + 1, memory.values.__getitem__, memory.history)
    digest = f"{hash(tuple(memory.values)):x}" if part.leads else ""
    me.say(part.finished(digest))


def _tell_of_takeover(part: Generation, applied: int) -> None:
    dead = [
        m.BrokenShard(part.action.past[back - 1].members[rank].worker, ledger.begun[rank] - 1, working - 1)
        for back, ledger in part.past.ledgers.items()
        for rank, working in enumerate(ledger.working)
        if working
    ]
    if part.plan or dead:
        recomputed = part.plan[1].recomputed if part.plan else 0
        part.me.say(m.StepTakenOver(part.me.number, part.action.generation, applied, recomputed, dead))


# --- a state for each ------------------------------------------------------------------------------------------------


def apart(part: Generation) -> Work:
    around, own, me = part.around, part.me.own, part.me
    reference, ledger, generation = around.memory.reference, part.ledger, part.action.generation
    yield around.pace.join_s * around.rng.random()
    ledger.letters[part.rank] = own.initialised, own.applied
    yield part.announce("meet", 1)
    if not any(initialised for initialised, _ in ledger.letters.values()):
        if part.leads:
            step, history = yield from load(part)
            own.initialised, own.applied, own.history = step > 0, step, history
            ledger.letters[part.rank] = own.initialised, own.applied
        yield part.announce("loaded", 1)
    truths = [(applied, -rank) for rank, (initialised, applied) in ledger.letters.items() if initialised]
    if not truths:
        own.initialised, own.applied, own.history = True, 0, {}
    else:
        truth, source = max(truths)
        behind = [rank for rank, position in ledger.letters.items() if position != (True, truth)]
        if behind and part.rank in (-source, *behind):
            giver = part.rank == -source
            yield around.pace.copy_s
            if giver:
                ledger.given = dict(own.history)
                part.ledger.announced["copied", 0] = set(range(ledger.size))
                around.released(ledger, ("copied", 0))
            else:
                yield Wait(ledger, ("copied", 0))
                own.initialised, own.applied, own.history = True, truth, dict(ledger.given)
    around.invariants.replica_at(me.number, own.applied, generation)
    me.step = own.applied
    if part.leads:
        part.recall_from(own.history, lambda: own.applied)
    values = lambda tile: reference.states[own.applied][tile]  # noqa: E731
    if own.applied > part.sealed(own.applied):
        yield from save_if_due(part, own.applied, values, own.history)
    for step in range(own.applied, reference.steps):
        plan = part.plan_of(step, reference.occupied[step])
        yield from part.compute(step, plan)
        part.writes("publishes", step)
        yield part.announce("arrived", step)
        part.add_up(step, plan)
        yield part.announce("collected", step)
        yield around.pace.tile_s * (0.5 + around.rng.random())
        part.writes("applies a step", step)
        finish_copies(part)
        own.applied = step + 1
        own.history[step] = part.applied(step)
        around.invariants.replica_at(me.number, own.applied, generation)
        part.finish_step(step, own.history)
        yield from save_if_due(part, step + 1, values, own.history)
    me.say(part.finished(f"{hash(reference.states[own.applied]):x}"))
