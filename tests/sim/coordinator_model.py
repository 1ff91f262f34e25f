"""A virtual coordinator process: the real decisions and the real journal format, performed one output at a time.

It can die between any two outputs, also in the middle of writing a record, and comes back with the next epoch. What
coordinator/server.py keeps in memory is lost with it: addresses, and metrics lines that were not flushed. On a full
disk a decision waits for room, and all that comes after it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from distbelief.control import messages as m
from distbelief.coordinator import journal
from distbelief.coordinator.rules import state as s
from distbelief.coordinator.rules.authorization import FROM_WORKERS, is_introduced
from distbelief.coordinator.rules.progress import REMEMBERED, Seen
from distbelief.coordinator.rules.replay import resumed
from distbelief.steadyclock import SteadyClock
from tests.sim.clock import Clock
from tests.sim.invariants import Invariants

TICK_S = 0.1
FLUSH_TICKS = 2
ROOM_S = 0.5
"""How often a full disk is tried again."""


class World(Protocol):
    clock: Clock
    rng: random.Random
    invariants: Invariants

    def clock_of_coordinator(self) -> SteadyClock: ...
    def disk_is_full(self) -> bool: ...
    def to_worker(self, worker: int, command: m.Command) -> None: ...
    def to_engine(self, command: m.Command) -> None: ...
    def to_client(self, sender: int, command: m.Command) -> None: ...
    def coordinator_died(self) -> None: ...
    def run_ended(self, status: str) -> None: ...


class VirtualCoordinator:
    def __init__(self, world: World, config: s.RunConfig) -> None:
        self._world = world
        self._config = config
        self.disk = b""
        self.metrics: list[dict[str, Any]] = []
        """Lines that are in the file."""
        self.alive = False
        self.frozen = False
        self.incarnations = 0
        self.started_at = 0.0
        self.dropped = 0
        self.state: s.State
        self.dies_at: Callable[[list[s.Output]], int | None] = lambda outputs: None
        """Before which of these outputs to die, if at all."""
        self._lines: list[dict[str, Any]] = []
        self._addresses: set[int] = set()
        self._engine = False
        self._backlog: list[tuple[s.Input, int]] = []
        self.waits_for_room = False

    def resume(self, config: s.RunConfig) -> None:
        """The first coordinator of another life of the run: everybody who took part before is gone."""
        self._config = config
        self.start(resume=True)

    def start(self, resume: bool = False) -> None:
        entries, end = journal._replay(self.disk, Path("journal.jsonl"))
        epoch = 1 + max((int(entry.get("epoch", 0)) for entry in entries), default=0)
        self.disk = self.disk[:end] + journal._encode({"kind": "epoch", "epoch": epoch, "reason": "took over"})
        steps = [(line["step"], line["fingerprint"]) for line in self.metrics if line["kind"] == "step"][-REMEMBERED:]
        seen = Seen(dict(steps), min(step for step, _ in steps)) if steps else Seen()
        self._time = self._world.clock_of_coordinator()
        now = self._time.now()
        if resume:
            before = s.resume(self._config, epoch, now, entries)
            entries.append(resumed(before, "allreduce", now))
            self.disk += journal._encode(entries[-1])
        self.state = s.resume(self._config, epoch, now, entries, seen)
        self.alive, self.frozen = True, False
        self.started_at = self._world.clock.now
        self.incarnations += 1
        self._lines, self._addresses, self._engine, self._backlog = [], set(), False, []
        self.waits_for_room = False
        self._world.clock.note("coordinator of epoch {} starts: generation {}", epoch, self.state.generation)
        self._ticks(self.incarnations, 0)

    def _ticks(self, incarnation: int, count: int) -> None:
        if not self.alive or incarnation != self.incarnations:
            return
        if not self.frozen and not self.waits_for_room:
            self.handle(s.Ticked())
            if count % FLUSH_TICKS == 0:
                self._flush()
        self._world.clock.after(TICK_S, self._ticks, incarnation, count + 1)

    def hear(self, event: m.Event, sender: int) -> None:
        """`sender`: a worker; -1: the engine; -2: a client. False: nobody is there to hear it."""
        if self.frozen or self.waits_for_room:
            self._backlog.append((event, sender))
        else:
            self.handle(event, sender)

    def wake(self) -> None:
        self.frozen = False
        self._catch_up()

    def _catch_up(self) -> None:
        while self._backlog and self.alive and not self.frozen and not self.waits_for_room:
            self.handle(*self._backlog.pop(0))

    def handle(self, event: s.Input, sender: int = -3) -> None:
        if isinstance(event, FROM_WORKERS) and not is_introduced(self.state.workers, event):
            self.dropped += 1
            return
        try:
            self.state, outputs = s.step(self.state, event, self._time.now())
        except s.ProtocolError:
            self.dropped += 1
            return
        if isinstance(event, m.EngineAttached):
            self._engine = True
        elif sender >= 0:
            self._addresses.add(sender)
        if outputs:
            self._perform(outputs, sender, self.dies_at(outputs))

    def _perform(self, outputs: list[s.Output], sender: int, death: int | None) -> None:
        world = self._world
        for number, output in enumerate(outputs):
            if number == death:
                self.die(torn=output)
                return
            match output:
                case s.Record(entry):
                    self._flush()
                    if not self._write(entry):
                        left = None if death is None else death - number
                        self._wait_for_room(self.incarnations, outputs[number:], sender, left)
                        return
                    if entry["kind"] == "checkpoint":
                        world.invariants.recorded(entry["step"])
                    world.clock.note("journal: {} ({})", entry["kind"], entry["reason"])
                case s.Report(line):
                    self._lines.append(line)
                case s.Send(worker, command):
                    self._send(worker, command)
                case s.Reply(command):
                    self._reply(sender, command)
                case s.Exit(status):
                    self._flush()
                    self.alive = False
                    world.run_ended(status)
                    return

    def _write(self, entry: dict[str, Any]) -> bool:
        if not self._world.disk_is_full():
            self.disk += journal._encode(entry)
            return True
        return False

    def _wait_for_room(self, incarnation: int, outputs: list[s.Output], sender: int, death: int | None) -> None:
        """Carry these out when the first of them can be recorded, and hear nothing before."""
        if not self.alive or incarnation != self.incarnations:
            return
        self.waits_for_room = True
        if self.frozen or self._world.disk_is_full():
            self._world.clock.after(ROOM_S, self._wait_for_room, incarnation, outputs, sender, death)
            return
        self.waits_for_room = False
        self.started_at = self._world.clock.now
        self._perform(outputs, sender, death)
        self._catch_up()

    def _send(self, worker: int, command: m.Command) -> None:
        if isinstance(command, m.StartGeneration):
            self._world.invariants.told(command)
        elif isinstance(command, m.SealCheckpoint):
            self._world.invariants.asked_to_seal(command)
        if worker == s.ENGINE:
            if self._engine:
                self._world.to_engine(command)
        elif worker in self._addresses:
            self._world.to_worker(worker, command)

    def _reply(self, sender: int, command: m.Command) -> None:
        if isinstance(command, m.StartGeneration):
            self._world.invariants.told(command)
        if sender >= 0:
            self._world.to_worker(sender, command)
        elif sender == -1:
            self._world.to_engine(command)
        else:
            self._world.to_client(sender, command)

    def _flush(self) -> None:
        if self._world.disk_is_full():
            return  # the lines wait in memory
        self.metrics += [line for line in self._lines if line["kind"] in ("step", "recovery", "notice")]
        self._lines = []

    def die(self, torn: s.Output | None = None) -> None:
        """SIGKILL. What is being written at that moment reaches the disk whole, in part, or not at all."""
        if not self.alive:
            return
        self.alive = False
        if isinstance(torn, s.Record):
            self._flush()
            data = journal._encode(torn.entry)
            most = 0 if self._world.disk_is_full() else len(data)
            self.disk += data[: self._world.rng.choice([0, most // 2, max(most - 1, 0), most])]
        self._world.clock.note("coordinator of epoch {} dies", self.state.epoch)
        self._world.coordinator_died()

    def records(self) -> list[dict[str, Any]]:
        entries, _ = journal._replay(self.disk, Path("journal.jsonl"))
        return entries

    def ended(self) -> str:
        """The status with which the run has ended, as the journal says; "" while it has not, or was resumed since."""
        last = [entry for entry in self.records() if entry["kind"] in ("ended", "resumed")][-1:]
        return str(last[0]["status"]) if last and last[0]["kind"] == "ended" else ""

    def failure(self) -> dict[str, Any]:
        found = next((entry for entry in reversed(self.records()) if entry["kind"] == "ended"), {})
        failure: dict[str, Any] = msgspec.to_builtins(found.get("failure", {"message": found.get("reason", "")}))
        return failure
