"""A whole run in one thread: the real coordinator's rules, the real control logic of workers, an engine that starts and
ends them, and a coordinator that can die between any two things that it does. For the tests next to this file."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s
from distbelief.coordinator.rules.progress import Seen
from distbelief.worker.rules import control
from tests.support.coordinator.play import CANARY, JOB, records, report


@dataclass
class Actor:
    """A worker's process."""

    state: control.WorkerState
    loaded: bool = False
    story: dict[type, m.Event] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.state.worker


class World:
    def __init__(self, workers: int = 3, **config: object) -> None:
        self.config = s.RunConfig(workers=workers, **{"save_every": "never", **config})
        self.coordinator = s.begin(self.config, epoch=1, now=0.0)
        self.journal: list[dict] = []
        self.actors: dict[int, Actor] = {}
        self.exited: dict[int, int] = {}
        self.committed = 0
        self.now = 0.0
        self._inbox: deque[tuple[int, m.Event]] = deque()
        self._crash_after: int | None = None
        for worker in range(workers):
            self._start(worker)

    # --- what happens ------------------------------------------------------------------------------------------------

    def tell(self, event: s.Input, sender: int = s.ENGINE) -> None:
        """The coordinator hears it, and all that follows from it."""
        self._inbox.append((sender, event))  # type: ignore[arg-type]
        while self._inbox:
            who, what = self._inbox.popleft()
            try:
                self.coordinator, outputs = s.step(self.coordinator, what, self.now)
            except s.ProtocolError:
                continue
            for output in outputs:
                if self._crash_after is not None:
                    self._crash_after -= 1
                    if self._crash_after < 0:
                        self._restart()
                        return
                self._perform(output, who)
            if self._crash_after is not None:  # it dies after the last thing, at the latest
                self._restart()
                return

    def crash(self, after: int, event: s.Input, sender: int = s.ENGINE) -> None:
        """The coordinator dies after it has done that many of the things that follow from the event."""
        self._crash_after = after
        self.tell(event, sender)

    def _restart(self) -> None:
        self._crash_after = None
        self._inbox.clear()
        steps = dict.fromkeys(range(self.committed), "aa")
        epoch = self.coordinator.epoch + 1
        self.coordinator = s.resume(self.config, epoch, self.now, self.journal, Seen(steps))

    def kill(self, worker: int) -> m.WorkerExited:
        del self.actors[worker]
        self.exited[worker] = -9
        return m.WorkerExited(worker, -9)

    def leave(self, worker: int) -> m.LeaveRequested:
        event = m.LeaveRequested(worker)
        self.actors[worker].story[type(event)] = event
        return event

    def load(self, worker: int) -> None:
        actor = self.actors[worker]
        actor.loaded = True
        joined, ready = m.WorkerJoined(worker, "here", 100 + worker), m.WorkerReady(worker, JOB, CANARY)
        actor.story |= {m.WorkerJoined: joined, m.WorkerReady: ready}
        self.tell(joined, worker)
        if worker in self.actors:
            self.tell(ready, worker)

    def round(self) -> None:
        """A second goes by: processes load, everybody gives a sign of life, and whoever can, trains."""
        self.now += 1.0
        self.tell(m.EngineAttached("here", {w: 100 + w for w in self.actors}, dict(self.exited)))
        for worker in [w for w, actor in self.actors.items() if not actor.loaded]:
            if worker in self.actors:
                self.load(worker)
        together = self._training_together()
        self.committed += together
        for worker in list(self.actors):
            if worker in self.actors and self.actors[worker].loaded:
                self._beat(self.actors[worker])
        self.tell(s.Ticked())

    def settle(self, rounds: int = 12) -> None:
        for _ in range(rounds):
            self.round()

    # --- what is so --------------------------------------------------------------------------------------------------

    @property
    def generations(self) -> list[int]:
        return [entry["generation"] for entry in self.journal if entry["kind"] == "generation"]

    def _training_together(self) -> bool:
        start = self.coordinator.start
        if start is None:
            return False
        members = [self.actors.get(member.worker) for member in start.members]
        return all(
            one and one.state.generation == start.generation and one.state.phase == "training" for one in members
        )

    # --- carrying out ------------------------------------------------------------------------------------------------

    def _beat(self, actor: Actor) -> None:
        state = actor.state
        leads = self.coordinator.seats.get(state.worker) == 0
        reports = [report(step, at=self.now) for step in range(self.committed)] if leads else []
        beat = m.Heartbeat(state.worker, state.epoch, state.generation, self.committed, m.Timing(), reports)
        self.tell(beat, state.worker)

    def _perform(self, output: s.Output, sender: int) -> None:
        match output:
            case s.Record(entry):
                self.journal += records([s.Record(entry)])
            case s.Send(worker, command):
                self._deliver(worker, command)
            case s.Reply(command):
                self._deliver(sender, command)

    def _deliver(self, to: int, command: m.Command) -> None:
        match command:
            case m.StartWorker(worker=worker) if to == s.ENGINE:
                if worker not in self.actors and worker not in self.exited:
                    self._start(worker)
            case m.Admit(worker=worker):
                self._start(worker)
            case m.KillWorker(worker=worker) if to == s.ENGINE:
                if worker in self.actors:
                    self._inbox.append((s.ENGINE, self.kill(worker)))
            case _ if to in self.actors and self.actors[to].loaded:
                self._obey(self.actors[to], command)

    def _start(self, worker: int) -> None:
        self.actors[worker] = Actor(control.WorkerState(worker))

    def _obey(self, actor: Actor, command: m.Command) -> None:
        actor.state, actions = control.step(actor.state, command)
        for action in actions:
            match action:
                case control.TellAgain():
                    self._inbox += [(actor.number, event) for event in actor.story.values()]
                case control.StandDown(generation):
                    event = m.WorkerLeft(actor.number, generation)
                    actor.story[m.WorkerLeft] = event
                    self._inbox.append((actor.number, event))
                case control.Leave():
                    del self.actors[actor.number]
                    self.exited[actor.number] = 0
                    self._inbox.append((s.ENGINE, m.WorkerExited(actor.number, 0)))
