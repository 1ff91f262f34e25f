"""A virtual worker process: the real control logic, a training thread in virtual time, and signals.

It does what worker/process.py and worker/link.py do: the control part answers commands and sends heartbeats at any
time, the training part notices an abort only where it waits for others. A frozen process does nothing; when it wakes,
both parts go on, in any order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from distbelief.control import messages as m
from distbelief.steadyclock import SteadyClock
from distbelief.transport.abort import Aborted
from distbelief.worker.rules import control
from distbelief.worker.rules.control import Action, GenerationFinished, WorkerState
from tests.sim.clock import Clock
from tests.sim.memory import Key, Ledger
from tests.sim.saving import VirtualSaver
from tests.sim.storage import Storage
from tests.sim.training import LOOK, OwnState, Surroundings, Wait, Work, train

GRACE_S = 2.0
NOTICE_S = 0.01
"""How soon a wait notices an abort, or that it is over."""


class Abort:
    def __init__(self) -> None:
        self.reason = ""


class World(Protocol):
    """What a process can reach."""

    clock: Clock
    around: Surroundings
    beat_s: float
    facts: tuple[m.JobFacts, m.Canary]
    waiters: dict[tuple[int, Key], list[VirtualWorker]]
    workers: dict[int, VirtualWorker]
    storage: Storage | None
    save_every: int

    def has_origin(self, worker: int) -> bool: ...
    def to_coordinator(self, worker: int, event: m.Event) -> None: ...
    def process_ended(self, worker: VirtualWorker, status: int) -> None: ...
    def group_broke(self, ledger: Ledger) -> None: ...


class VirtualWorker:
    def __init__(self, world: World, number: int, host: str, load_s: float, clock: SteadyClock) -> None:
        self.world = world
        self.number = number
        self.host = host
        self.clock = clock
        self.pid = 1000 + number
        self.control = WorkerState(number)
        self.alive = True
        self.frozen = False
        self.slowness = 1.0
        # what the training thread leaves for heartbeats
        self.step = 0
        self.busy_s = 0.0
        self.computed = 0
        self.reports: list[m.StepReport] = []
        self.recall: Callable[[int], None] = lambda reported: None
        self.own = OwnState()
        self.waiting = False
        storage = world.storage
        self.saver = VirtualSaver(self, storage, world.save_every, world.clock) if storage else None
        self.origin = storage if world.has_origin(number) else None
        # the two threads
        self.ready = False
        self.story: dict[type, m.Event] = {}
        self.abort = Abort()
        self.actions: deque[tuple[Action, Abort]] = deque()
        self.backlog: list[m.Command] = []
        self.blocked: Wait | None = None
        self.idle = False
        self.group: Ledger | None = None
        self._abort_of_work = self.abort
        self._deferred: tuple[int, Any] | None = None
        self._turn = 0
        self._work = self._life(load_s)
        self._go_on(None)

    # --- the training thread -----------------------------------------------------------------------------------------

    def _life(self, load_s: float) -> Work:
        yield load_s
        self.ready = True
        self.say(m.WorkerJoined(self.number, self.host, self.pid))
        self.say(m.WorkerReady(self.number, *self.world.facts))
        self.world.clock.after(self.world.beat_s * self.world.around.rng.random(), self._beats)
        while True:
            while not self.actions:
                self.idle = True
                yield float("inf")
            action, abort = self.actions.popleft()
            match action:
                case control.Leave():
                    self.exit(0)
                    yield float("inf")
                case control.StandDown(generation):
                    self.say(m.WorkerLeft(self.number, generation))
                case control.TrainGeneration():
                    self._abort_of_work = abort
                    self.waiting = False
                    if action.transport != "shm":
                        self.group = self.world.around.memory.ledger(action)
                    try:
                        yield from train(self.world.around, self, action)
                        self.decide(GenerationFinished(action.generation))
                    except Aborted as error:
                        if not abort.reason:
                            self.say(m.CollectiveFailed(self.number, action.generation, str(error)))
                        if self.group is not None:
                            self.world.group_broke(self.group)
                    self.group = None
                    if self.saver:
                        self.saver.let_go()

    def _go_on(self, error: Aborted | None) -> None:
        """Run the training thread until it takes time or waits."""
        clock = self.world.clock
        self._turn += 1
        self.blocked = None
        while True:
            asked = self._work.throw(error) if error else next(self._work)  # type: ignore[attr-defined]
            error = None
            if not self.alive:
                return
            if isinstance(asked, Wait):
                if asked.ledger.complete(asked.key):
                    self.waiting = False
                    continue
                self.waiting = True
                if self._abort_of_work.reason:
                    error = Aborted(self._abort_of_work.reason)
                    continue
                if asked.ledger.broken:
                    error = Aborted("a connection between members broke")
                    continue
                self.blocked = asked
                self.world.waiters.setdefault((asked.ledger.generation, asked.key), []).append(self)
            elif asked == LOOK:
                error = Aborted(self._abort_of_work.reason) if self._abort_of_work.reason else None
                continue
            elif asked != float("inf"):
                clock.after(asked * self.slowness, self._turn_comes, self._turn, None)
            return

    def _turn_comes(self, turn: int, error: Aborted | None) -> None:
        if not self.alive or turn != self._turn:
            return
        if self.frozen:
            self._deferred = turn, error
            return
        if error is None:
            self.waiting = False
        self._go_on(error)

    def released(self) -> None:
        """What it waits for is there."""
        self.world.clock.after(NOTICE_S * self.world.around.rng.random(), self._turn_comes, self._turn, None)

    def interrupted(self, reason: str) -> None:
        """Give up the wait, if it still waits when it notices."""
        delay_s = NOTICE_S * self.world.around.rng.random()
        self.world.clock.after(delay_s, self._turn_comes, self._turn, Aborted(reason))

    def wake_if_idle(self) -> None:
        if self.idle and self.alive:
            self.idle = False
            self.world.clock.after(0.0, self._turn_comes, self._turn, None)

    # --- the control thread ------------------------------------------------------------------------------------------

    def say(self, event: m.Event) -> None:
        self.beat()
        self.story.pop(type(event), None)
        self.story[type(event)] = event
        self.world.to_coordinator(self.number, event)

    def chance(self) -> float:
        return self.world.around.rng.random()

    def all_heard_of(self, members: Sequence[m.Member]) -> int:
        there = [self.world.workers[one.worker] for one in members]
        return min(one.control.generation for one in there if one.alive)

    def beat(self) -> None:
        reports, self.reports[:] = list(self.reports), []
        timing = m.Timing(0.0, self.busy_s, 0.0, self.computed)
        state = self.control
        facts = self.number, state.epoch, state.generation, self.step, timing, reports
        beat = m.Heartbeat(*facts, waiting=self.waiting, finished=state.phase == "finished")
        self.world.to_coordinator(self.number, beat)

    def _beats(self) -> None:
        if not self.alive:
            return
        if not self.frozen:
            self.beat()
        self.world.clock.after(self.world.beat_s, self._beats)

    def hear(self, command: m.Command) -> None:
        if not self.alive or not self.ready:
            return
        if self.frozen:
            self.backlog.append(command)
        else:
            self.decide(command)

    def decide(self, event: m.Command | GenerationFinished) -> None:
        before = self.control
        self.control, actions = control.step(before, event)
        self.world.around.invariants.obeyed(before, event, self.control, actions)
        for action in actions:
            match action:
                case control.AbortStep(reason):
                    self.abort.reason = reason
                    if self.group is not None and self._abort_of_work is self.abort:
                        self.world.group_broke(self.group)
                    if self.blocked is not None and self._abort_of_work is self.abort:
                        self.interrupted(reason)
                case control.TellAgain(reported):
                    self.recall(reported)
                    self.beat()
                    for told in list(self.story.values()):
                        self.world.to_coordinator(self.number, told)
                case control.Save():
                    if self.saver:
                        self.saver.ask(action, self.step)
                case control.Seal():
                    if self.saver:
                        self.saver.seal(action)
                case control.TrainGeneration():
                    self.abort = Abort()
                    self.actions.append((action, self.abort))
                case _:
                    self.actions.append((action, self.abort))
            if isinstance(action, control.Leave):
                self.world.clock.after(GRACE_S, self.exit, 0)
        if actions:
            self.wake_if_idle()

    # --- signals -----------------------------------------------------------------------------------------------------

    def exit(self, status: int) -> None:
        if self.alive and not (self.frozen and status == 0):
            self.alive = False
            self._turn += 1
            if self.group is not None:
                self.world.group_broke(self.group)
            self.world.process_ended(self, status)

    def vanish(self) -> None:
        """SIGKILL, together with whoever could tell of it."""
        self.alive = False
        self._turn += 1

    def freeze(self) -> None:
        self.frozen = True

    def wake(self) -> None:
        if not self.alive or not self.frozen:
            return
        self.frozen = False
        if self.saver:
            self.saver.thawed()
        deferred, self._deferred = self._deferred, None
        backlog, self.backlog = self.backlog, []
        clock, rng = self.world.clock, self.world.around.rng
        if deferred:
            clock.after(0.01 * rng.random(), self._turn_comes, *deferred)
        heard_s = 0.01 * rng.random()
        for number, command in enumerate(backlog):
            clock.after(heard_s + 1e-6 * number, self.hear, command)

    def ask_to_leave(self) -> None:
        """SIGTERM."""
        if not self.ready:
            self.exit(0)
        elif not self.frozen:
            self.say(m.LeaveRequested(self.number))
