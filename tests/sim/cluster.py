"""A whole run in one thread: coordinator, engine, workers, lines between them, and what goes wrong.

`run(seed)` gives the same outcome for the same seed. The engine does what launch/lead.py does: it starts workers,
tells of exits, kills on the coordinator's word, and starts the coordinator again when it dies.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s
from distbelief.coordinator.rules.saving import FINAL_S
from distbelief.shards import Schedule
from distbelief.steadyclock import SteadyClock
from tests.sim import faults
from tests.sim.clock import Clock
from tests.sim.coordinator_model import VirtualCoordinator
from tests.sim.faults import Kind
from tests.sim.invariants import Broken, Invariants
from tests.sim.memory import Key, Ledger, SharedMemory
from tests.sim.mischief import HOST, HOUR_S, Mischief
from tests.sim.network import Network
from tests.sim.reference import Reference
from tests.sim.setting import setting
from tests.sim.storage import Storage
from tests.sim.training import Pace, Surroundings
from tests.sim.verdict import PATIENCE_S, judge
from tests.sim.worker_model import VirtualWorker

ATTACH_EVERY_S = 1.0
ENGINE, CLIENT = -1, -2
EPOCH_S = 1.75e9
"""What a right clock shows at the beginning."""


class Cluster:
    def __init__(self, seed: int, members: int | None = None) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.setting = chosen = setting(rng, members)
        self.clock = Clock()
        self.walls = {HOST: EPOCH_S}
        """Host -> how far its clock is ahead of the virtual one. Anybody may set it."""
        self.full_until = 0.0
        """Until when the disk of the run directory has no room."""
        self.network = Network(self.clock, rng, faults.weather(rng))
        batch = chosen.shards * rng.choice([1, 4])
        schedule = Schedule(batch * 3 + rng.randint(1, batch), batch, chosen.shards)
        self.reference = Reference(schedule, chosen.steps, chosen.tiles)
        self.invariants = Invariants(self.reference)
        self.storage = Storage(self.invariants, rng, lambda: self.clock.now) if chosen.saves else None
        self.save_every = chosen.save_every
        memory = SharedMemory(self.reference, chosen.tiles, self.invariants)
        pace = Pace(shard_s=rng.choice([0.05, 0.2, 0.5]), tile_s=rng.choice([0.01, 0.1, 0.3]))
        self.around = Surroundings(memory, self.invariants, pace, rng, self.released)
        self.beat_s = chosen.beat_s
        self.facts = (
            m.JobFacts("sim", chosen.shards, chosen.steps, batch, schedule.samples, 1, "allreduce"),
            m.Canary("the same", {}),
        )
        self.waiters: dict[tuple[int, Key], list[VirtualWorker]] = {}
        self.workers: dict[int, VirtualWorker] = {}
        self.exits: dict[int, int] = {}
        self.exit_times: dict[int, float] = {}
        self.status = ""
        self.stopping = False
        """Somebody wants the run to stop: the engine says so again and again."""
        self.life = 1
        self.lead_clock = self._clock_on(HOST)
        """Of the launching process; the coordinator and all workers of its host go on with it."""
        """What was sent in an earlier one is heard by nobody: the secret is another."""
        self.epoch = 0
        self.early_deaths = 0
        """Workers that died before they were ready."""
        self.coordinator_died_at = float("-inf")
        self.mischief = Mischief(self, rng)
        self.coordinator = VirtualCoordinator(self, self._config(chosen.members))

    def _config(self, workers: int) -> s.RunConfig:
        chosen = self.setting
        return s.RunConfig(
            workers,
            transport=chosen.transport,
            min_workers=min(chosen.min_workers, workers),
            stuck_after_s=30.0,
            save_every=chosen.save_every_text,
        )

    # --- clocks and disks ---------------------------------------------------------------------------------------------

    def _clock_on(self, host: str) -> SteadyClock:
        """The clock of a new process there."""
        self.walls.setdefault(host, EPOCH_S + self.rng.choice([0.0, 0.0, -3 * HOUR_S, 3 * HOUR_S]))
        return SteadyClock(lambda: self.clock.now + self.walls[host], lambda: self.clock.now)

    def clock_of_coordinator(self) -> SteadyClock:
        clock = self._clock_on(HOST)
        clock.continue_from(self.lead_clock.offset_s)
        return clock

    def disk_is_full(self) -> bool:
        return self.clock.now < self.full_until

    # --- lines -------------------------------------------------------------------------------------------------------

    def to_coordinator(self, worker: int, event: m.Event) -> None:
        if isinstance(event, m.WorkerFinished):
            self.mischief.finished(self.workers[worker])
        self.network.send(worker, True, self._at_coordinator, event, worker, self.life)

    def _at_coordinator(self, event: m.Event, sender: int, life: int) -> None:
        if life != self.life:
            return
        if self.coordinator.alive:
            self.coordinator.hear(event, sender)
        elif (
            self.rng.random() < 0.5
        ):  # it waits for the next one in the sender's queue; else it went down with this one
            self.clock.after(0.1, self._at_coordinator, event, sender, life)

    def to_worker(self, worker: int, command: m.Command) -> None:
        self.network.send(worker, False, self._at_worker, worker, command, self.life)

    def _at_worker(self, worker: int, command: m.Command, life: int) -> None:
        if worker in self.workers and life == self.life:
            self.workers[worker].hear(command)

    def to_engine(self, command: m.Command) -> None:
        self.network.send(ENGINE, False, self._at_engine, command, self.life)

    def from_client(self, event: m.Event, sender: int = CLIENT) -> None:
        self._at_coordinator(event, sender, self.life)

    def to_client(self, sender: int, command: m.Command) -> None:
        if isinstance(command, m.Answer):
            if sender == CLIENT:
                self.mischief.answered()
        elif isinstance(command, m.Admit):
            host = "elsewhere" if self.setting.transport == "gloo" and self.rng.random() < 0.7 else HOST
            self.clock.after(0.2 * self.rng.random(), self._start_worker, command.worker, self.life, host)

    def released(self, ledger: Ledger, key: Key) -> None:
        self.mischief.generation_met(ledger, key)
        for worker in self.waiters.pop((ledger.generation, key), ()):
            if worker.blocked is not None and worker.blocked.key == key and worker.blocked.ledger is ledger:
                worker.released()

    def group_broke(self, ledger: Ledger) -> None:
        if not ledger.broken:
            ledger.broken = True
            for worker in self.workers.values():
                blocked = worker.blocked
                if blocked is not None and blocked.ledger is ledger and not ledger.complete(blocked.key):
                    worker.interrupted("a connection between members broke")

    # --- the engine --------------------------------------------------------------------------------------------------

    def has_origin(self, worker: int) -> bool:
        """Whether it looks for a checkpoint when nobody has the state: in a resumed run, or after all first workers."""
        return self.life > 1 or worker >= self.setting.members

    def _start_worker(self, number: int, life: int, host: str = HOST) -> None:
        if number not in self.workers and not self.status and life == self.life:
            load_s = self.rng.choice([0.2, 1.0, 3.0]) * (0.5 + self.rng.random())
            clock = self.lead_clock if host == HOST else self._clock_on(f"{host} {number}")
            self.workers[number] = VirtualWorker(self, number, host, load_s, clock)

    def _attach(self, life: int) -> None:
        if life != self.life:
            return
        running = {number: one.pid for number, one in self.workers.items() if one.alive and one.host == HOST}
        self.to_coordinator(ENGINE, m.EngineAttached(HOST, running, dict(self.exits)))
        if self.stopping:
            self.to_coordinator(ENGINE, m.StopRequested("SIGTERM received"))
        self.clock.after(ATTACH_EVERY_S, self._attach, life)

    def _at_engine(self, command: m.Command, life: int) -> None:
        if life != self.life:
            return
        self.epoch = max(self.epoch, command.epoch)
        if command.epoch < self.epoch:
            return
        match command:
            case m.StartWorker(_, number):
                self.clock.after(0.02 * self.rng.random(), self._start_worker, number, life)
            case m.KillWorker(_, number, _):
                self.clock.after(0.02 * self.rng.random(), self._kill, number)

    def _kill(self, number: int) -> None:
        if number in self.workers and self.workers[number].host == HOST:
            self.workers[number].exit(-9)

    def process_ended(self, worker: VirtualWorker, status: int) -> None:
        self.clock.note("worker {} ends with status {}", worker.number, status)
        if status and not worker.ready:
            self.early_deaths += 1
        if status:
            self.mischief.worker_died(worker)
            self._neighbour_sees(worker)
        if worker.host == HOST:
            self.clock.after(0.01 * self.rng.random(), self._tell_exit, worker.number, status, self.life)

    def _neighbour_sees(self, dead: VirtualWorker) -> None:
        """In shared memory a member notices the death of the next one, often before the engine does."""
        members = self.invariants.members_that_met()
        ranks = [rank for rank, one in enumerate(members) if one.worker == dead.number]
        if self.setting.transport != "shm" or not ranks or len(members) < 2 or self.rng.random() < 0.3:
            return
        witness = self.workers[members[ranks[0] - 1].worker]
        if witness.alive and not witness.frozen:
            event = m.PeerDied(witness.number, self.invariants.met, dead.number)
            self.clock.after(0.005 * self.rng.random(), witness.say, event)

    def _tell_exit(self, number: int, status: int, life: int) -> None:
        if life != self.life:
            return
        self.exits[number] = status
        self.exit_times[number] = self.clock.now
        self.to_coordinator(ENGINE, m.WorkerExited(number, status))

    def coordinator_died(self) -> None:
        self.coordinator_died_at = self.clock.now
        self.mischief.coordinator_died()
        self.clock.after(0.1 + 0.5 * self.rng.random(), self._revive, self.life)

    def _revive(self, life: int) -> None:
        if life != self.life:
            return
        if self.coordinator.ended():
            self.run_ended(self.coordinator.ended())
        elif self.disk_is_full():  # it waits for room
            self.clock.after(0.5, self._revive, life)
        elif not self.coordinator.alive:
            self.coordinator.start()

    def run_ended(self, status: str) -> None:
        self.clock.note("the run has ended: {}", status)
        if status == "stopped" and self.stopping:
            self.everything_killed()
            return
        self.status = status
        self.clock.stopped = True

    # --- another life ------------------------------------------------------------------------------------------------

    def everything_killed(self) -> None:
        """Engine, coordinator and workers are gone, and all memory; somebody resumes the run a little later."""
        self.clock.note("everything is gone")
        self.coordinator.die()
        self.life += 1
        for worker in self.workers.values():
            worker.vanish()
        self.invariants.everybody_is_gone()
        self.clock.after(1.0, self._resume, self.life)

    def _resume(self, life: int) -> None:
        if life != self.life:
            return
        if self.disk_is_full():  # it is refused, and somebody tries again
            self.clock.after(1.0, self._resume, life)
            return
        self.lead_clock = self._clock_on(HOST)
        workers = max(1, self.setting.members + self.rng.choice([-1, 0, 0, 1]))
        self.stopping, self.epoch = False, 0
        self.workers, self.exits, self.exit_times = {}, {}, {}
        memory = SharedMemory(self.reference, self.setting.tiles, self.invariants)
        self.around = replace(self.around, memory=memory)
        self.mischief.next_life(workers)
        self.coordinator.resume(self._config(workers))
        self._attach(self.life)

    # --- the run -----------------------------------------------------------------------------------------------------

    def run(self, only: Sequence[Kind] = ()) -> None:
        """Raises Broken when a promise is broken. `only`: the kinds of faults."""
        planned = faults.schedule(self.rng, self.setting.span_s, self.setting.members, only)
        self.coordinator.start()
        self._attach(self.life)
        for number in range(self.setting.members):
            self._start_worker(number, self.life)
        for fault in planned:
            self.clock.after(fault.at_s, self.mischief.inject, fault)
        quiet_s = planned[-1].at_s + 1.0
        self.clock.after(quiet_s, self.network.clear)
        self.clock.run(quiet_s + PATIENCE_S)
        if self._waits_for_a_silent_writer():
            self.clock.run(quiet_s + PATIENCE_S + FINAL_S)
        judge(self)

    def _waits_for_a_silent_writer(self) -> bool:
        """Nobody watches a member that has finished; its part of the last checkpoint is not waited for for ever."""
        members = [self.workers.get(one.worker) for one in self.coordinator.state.members]
        finished = [one for one in members if one and one.control.phase == "finished"]
        return not self.status and any(one.frozen or (not one.alive and one.host != HOST) for one in finished)


@dataclass(frozen=True)
class Outcome:
    seed: int
    broken: str
    """"": every promise was kept."""
    story: list[str]
    virtual_s: float
    events: int
    faults: Counter[str]


def run(seed: int, members: int | None = None, only: Sequence[Kind] = ()) -> Outcome:
    cluster = Cluster(seed, members)
    broken = ""
    try:
        cluster.run(only)
    except Broken as error:
        broken = str(error)
    except Exception:
        broken = f"an error in the code:\n{traceback.format_exc()}"
    story = cluster.clock.story() if broken else []
    return Outcome(seed, broken, story, cluster.clock.now, cluster.clock.events, cluster.mischief.done)
