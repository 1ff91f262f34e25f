"""A whole run in one thread: coordinator, engine, workers, lines between them, and what goes wrong.

`run(seed)` gives the same outcome for the same seed. The engine does what engines/local.py does: it starts workers,
tells of exits, kills on the coordinator's word, and starts the coordinator again when it dies.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from dataclasses import dataclass
from typing import Any

from distbelief.comm import messages as m
from distbelief.coordinator import state as s
from distbelief.shards import Schedule

from sim import faults
from sim.clock import Clock
from sim.coordinator_model import VirtualCoordinator
from sim.faults import Fault
from sim.invariants import Broken, Invariants
from sim.memory import Key, Ledger, SharedMemory
from sim.network import Network
from sim.reference import Reference
from sim.training import Pace, Surroundings
from sim.worker_model import VirtualWorker

ATTACH_EVERY_S = 1.0
PATIENCE_S = 400.0
"""So long after the last fault a run must be over."""
ENGINE, CLIENT = -1, -2
HOST = "host"
"""Where the engine is. Workers that somebody starts by hand may be elsewhere."""


@dataclass(frozen=True)
class Setting:
    """What a seed stands for."""

    members: int
    shards: int
    steps: int
    tiles: int
    transport: Any
    span_s: float
    beat_s: float
    min_workers: int


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
    )


class Cluster:
    def __init__(self, seed: int, members: int | None = None) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.setting = chosen = setting(rng, members)
        self.clock = Clock()
        self.network = Network(self.clock, rng, faults.weather(rng))
        self._harsh = self.network.weather.harsh
        batch = chosen.shards * rng.choice([1, 4])
        schedule = Schedule(batch * 3 + rng.randint(1, batch), batch, chosen.shards)
        self.reference = Reference(schedule, chosen.steps, chosen.tiles)
        self.invariants = Invariants(self.reference)
        memory = SharedMemory(self.reference, chosen.tiles, self.invariants)
        pace = Pace(shard_s=rng.choice([0.05, 0.2, 0.5]), tile_s=rng.choice([0.01, 0.1, 0.3]))
        self.around = Surroundings(memory, self.invariants, pace, rng, lambda: self.clock.now, self.released)
        self.beat_s = chosen.beat_s
        self.facts = (
            m.JobFacts("sim", chosen.shards, chosen.steps, batch, schedule.samples, 1, "allreduce"),
            m.Canary("the same", {}),
        )
        self.waiters: dict[tuple[int, Key], list[VirtualWorker]] = {}
        self.workers: dict[int, VirtualWorker] = {}
        self.exits: dict[int, int] = {}
        self._exit_times: dict[int, float] = {}
        self.status = ""
        self.epoch = 0
        self.faults = Counter[str]()
        self.wanted = chosen.members
        self.pending_scale: int | None = None
        self.early_deaths = 0
        """Workers that died before they were ready."""
        self._deaths_before_start = 0
        self._kills_at_change = 0
        self._coordinator_died_at = -1000.0
        self._shard_deaths: dict[tuple[int, int], set[int]] = {}
        config = s.RunConfig(
            chosen.members, transport=chosen.transport, min_workers=chosen.min_workers, stuck_s=30.0
        )
        self.coordinator = VirtualCoordinator(self, config)

    # --- lines -------------------------------------------------------------------------------------------------------

    def to_coordinator(self, worker: int, event: m.Event) -> None:
        self.network.send(worker, True, self._at_coordinator, event, worker)

    def _at_coordinator(self, event: m.Event, sender: int) -> None:
        if self.coordinator.alive:
            self.coordinator.hear(event, sender)
        elif self.rng.random() < 0.5:  # it waits for the next one in the sender's queue; else it went down with this one
            self.clock.after(0.1, self._at_coordinator, event, sender)

    def to_worker(self, worker: int, command: m.Command) -> None:
        self.network.send(worker, False, self._at_worker, worker, command)

    def _at_worker(self, worker: int, command: m.Command) -> None:
        if worker in self.workers:
            self.workers[worker].hear(command)

    def to_engine(self, command: m.Command) -> None:
        self.network.send(ENGINE, False, self._at_engine, command)

    def to_client(self, command: m.Command) -> None:
        if isinstance(command, m.Answer):
            self.pending_scale = None
        elif isinstance(command, m.Admit):
            host = "elsewhere" if self.setting.transport == "gloo" and self.rng.random() < 0.7 else HOST
            self.clock.after(0.2 * self.rng.random(), self._start_worker, command.worker, host)

    def released(self, ledger: Ledger, key: Key) -> None:
        if key == ("meet", 1) and self._kills_at_change:
            self._kills_at_change -= 1
            members = [one.worker for one in self.invariants.generation(ledger.generation).members]
            self.clock.after(self.rng.random(), self._kill_unless_guilty, self.workers[self.rng.choice(members)])
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

    def _start_worker(self, number: int, host: str = HOST) -> None:
        if number not in self.workers and not self.status:
            load_s = self.rng.choice([0.2, 1.0, 3.0]) * (0.5 + self.rng.random())
            self.workers[number] = VirtualWorker(self, number, host, load_s)

    def _attach(self) -> None:
        running = {number: one.pid for number, one in self.workers.items() if one.alive and one.host == HOST}
        self.to_coordinator(ENGINE, m.EngineAttached(HOST, running, dict(self.exits)))
        self.clock.after(ATTACH_EVERY_S, self._attach)

    def _at_engine(self, command: m.Command) -> None:
        self.epoch = max(self.epoch, command.epoch)
        if command.epoch < self.epoch:
            return
        match command:
            case m.StartWorker(_, number):
                self.clock.after(0.02 * self.rng.random(), self._start_worker, number)
            case m.KillWorker(_, number, _):
                self.clock.after(0.02 * self.rng.random(), self._kill, number)

    def _kill(self, number: int) -> None:
        if number in self.workers and self.workers[number].host == HOST:
            self.workers[number].exit(-9)

    def process_ended(self, worker: VirtualWorker, status: int) -> None:
        self.clock.note("worker {} ends with status {}", worker.number, status)
        if status and not worker.ready:
            self.early_deaths += 1
        for ledger in self.around.memory.ledgers.values() if status else ():
            for rank, shard in enumerate(ledger.working):
                if shard and self._member(ledger, rank) == worker.number:
                    self._shard_deaths.setdefault((ledger.begun[rank] - 1, shard - 1), set()).add(worker.number)
        if worker.host == HOST:
            self.clock.after(0.01 * self.rng.random(), self._tell_exit, worker.number, status)

    def _member(self, ledger: Ledger, rank: int) -> int:
        return self.invariants.generation(ledger.generation).members[rank].worker

    def _tell_exit(self, number: int, status: int) -> None:
        self.exits[number] = status
        self._exit_times[number] = self.clock.now
        self.to_coordinator(ENGINE, m.WorkerExited(number, status))

    def coordinator_died(self) -> None:
        self._coordinator_died_at = self.clock.now
        self.clock.after(0.1 + 0.5 * self.rng.random(), self._revive)

    def _revive(self) -> None:
        if self.coordinator.ended():
            self.run_ended(self.coordinator.ended())
        elif not self.coordinator.alive:
            self.coordinator.start()

    def run_ended(self, status: str) -> None:
        self.clock.note("the run has ended: {}", status)
        self.status = status
        self.clock.stopped = True

    # --- faults ------------------------------------------------------------------------------------------------------

    def inject(self, fault: Fault) -> None:
        kind, rng = fault.kind, self.rng
        self.clock.note("fault: {}", fault)
        self.faults[kind] += 1
        if kind.startswith("kill coordinator"):
            self._kill_coordinator(decides=kind != "kill coordinator")
        elif kind == "freeze coordinator":
            if self.coordinator.alive:
                self.coordinator.frozen = True
                self.clock.after(min(fault.duration_s, 8.0), self.coordinator.wake)
        elif kind == "kill at the next change":
            self._kills_at_change += 1
        elif kind == "join":
            self.wanted += 1
            if not self._gathering():
                self._at_coordinator(m.JoinRequested(pid=rng.randrange(10_000)), CLIENT)
        elif kind == "scale":
            self.pending_scale = max(1, self.setting.min_workers, self.wanted + fault.amount)
            self._ask_for_scale()
        else:
            there = [worker for worker in self.workers.values() if worker.alive]
            for worker in rng.sample(there, min(fault.amount, len(there))):
                self._hit(worker, fault)

    def _hit(self, worker: VirtualWorker, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                self._kill_unless_guilty(worker)
            case "freeze":
                known = self.coordinator.state.workers.get(worker.number)
                # Who freezes for ever while it loads the job is given up after many minutes only.
                forever = known is not None and known.ready and not self._gathering()
                duration_s = fault.duration_s if forever else min(fault.duration_s, 8.0)
                if not self._guilty(worker):
                    worker.freeze()
                    if duration_s < float("inf"):
                        self.clock.after(duration_s, worker.wake)
            case "slow":
                worker.slowness = self.rng.choice([2.0, 5.0])
            case "leave":
                if worker.ready or (worker.host == HOST and (not self._gathering() or self._may_die())):
                    worker.ask_to_leave()
            case "cut":
                self.network.cut(worker.number, fault.duration_s)

    def _kill_unless_guilty(self, worker: VirtualWorker) -> None:
        # Of who comes by hand from elsewhere and dies on the way nobody ever hears; its place is kept for it.
        unseen = worker.host != HOST and worker.number not in self.coordinator.state.workers
        if not unseen and not self._guilty(worker) and (self._may_die() or not self._gathering()):
            self.clock.note("worker {} is killed", worker.number)
            worker.exit(-9)

    def _gathering(self) -> bool:
        return self.coordinator.state.phase == "gathering"

    def _may_die(self) -> bool:
        """Three deaths before the start rightly end the run."""
        self._deaths_before_start += self._gathering()
        return self._deaths_before_start <= 2

    def _guilty(self, worker: VirtualWorker) -> bool:
        """Whether the shard that it computes has killed somebody before: a second death would rightly end the run."""
        for ledger in self.around.memory.ledgers.values():
            for rank, shard in enumerate(ledger.working):
                if shard and (ledger.begun[rank] - 1, shard - 1) in self._shard_deaths:
                    if self._member(ledger, rank) == worker.number:
                        return True
        return False

    def _kill_coordinator(self, decides: bool) -> None:
        coordinator = self.coordinator
        if not decides:
            coordinator.die()
            return

        def dies_at(outputs: list[s.Output]) -> int | None:
            if not any(isinstance(output, s.Record) for output in outputs):
                return None
            coordinator.dies_at = lambda outputs: None
            return self.rng.randrange(len(outputs))

        coordinator.dies_at = dies_at

    def _ask_for_scale(self) -> None:
        """As a person would: again, until it is answered."""
        if self.pending_scale is not None and not self.status:
            self.wanted = self.pending_scale
            if self.coordinator.alive:
                self._at_coordinator(m.ScaleRequested(self.pending_scale), CLIENT)
            self.clock.after(2.0, self._ask_for_scale)

    # --- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises Broken when a promise is broken."""
        planned = faults.schedule(self.rng, self.setting.span_s, self.setting.members)
        self.coordinator.start()
        self._attach()
        for number in range(self.setting.members):
            self._start_worker(number)
        for fault in planned:
            self.clock.after(fault.at_s, self.inject, fault)
        quiet_s = planned[-1].at_s + 1.0
        self.clock.after(quiet_s, self.network.clear)
        self.clock.run(quiet_s + PATIENCE_S)
        self._judge()

    def _judge(self) -> None:
        state = self.coordinator.state
        if not self.status:
            raise Broken(f"the run has not ended {PATIENCE_S:.0f} s after the last fault: {self._where()}")
        if self.status != "completed":
            raise Broken(f"the run {self.status}: {self.coordinator.failure().get('message', '')}")
        self._judge_accounts()
        knows = {member.worker: self.workers[member.worker].control.generation for member in state.members}
        alive = {worker: known for worker, known in knows.items() if self.workers[worker].alive}
        self.invariants.completed(state.generation, alive)

    def _judge_accounts(self) -> None:
        """What the coordinator has written down, and whom it waits for."""
        state = self.coordinator.state
        told = Counter(line["step"] for line in self.coordinator.metrics if line["kind"] == "step")
        wrong = [step for step in range(self.setting.steps) if told[step] != 1]
        # Where messages are lost lines may be missing; and the last ones, when a coordinator dies near the end.
        late_death = self.clock.now - self._coordinator_died_at < 12.0 and wrong[-1:] == [self.setting.steps - 1]
        if wrong and not (self.network.lost or self._harsh or late_death):
            raise Broken(f"the metrics file has the steps {wrong} not exactly once")
        if max(told.values(), default=0) > 1:
            raise Broken(f"the metrics file has steps twice: {wrong}")
        if state.troubles.failed_hires >= 3 and self.early_deaths < 3:
            raise Broken(f"hiring was given up after {self.early_deaths} deaths of newcomers")
        since = max(self.coordinator.started_at, self.clock.now - 5.0)  # what it has had time to hear of
        ghosts = [worker for worker in state.hired if self._exit_times.get(worker, since) < since]
        if ghosts and self.clock.now - self.coordinator.started_at > 5.0:
            raise Broken(f"the coordinator waits for the workers {ghosts} to come, which are dead")

    def _where(self) -> str:
        state = self.coordinator.state
        members = [
            f"{one.worker}{'' if self.workers[one.worker].alive else ' (dead)'}"
            f"{' (frozen)' if self.workers[one.worker].frozen else ''}"
            f"{' leaving' if state.workers[one.worker].leaving else ''}: generation "
            f"{self.workers[one.worker].control.generation}, step {self.workers[one.worker].step}, "
            f"waits for {self.workers[one.worker].blocked and self.workers[one.worker].blocked.key}"
            for one in state.members
        ]
        return (
            f"phase {state.phase}, generation {state.generation}, paused {state.paused}, finished {state.finished}, "
            f"hired {dict(state.hired)}, target {state.target}, members {members[:10]}"
        )


@dataclass(frozen=True)
class Outcome:
    seed: int
    broken: str
    """"": every promise was kept."""
    story: list[str]
    virtual_s: float
    events: int
    faults: Counter[str]


def run(seed: int, members: int | None = None) -> Outcome:
    cluster = Cluster(seed, members)
    broken = ""
    try:
        cluster.run()
    except Broken as error:
        broken = str(error)
    except Exception:
        broken = f"an error in the code:\n{traceback.format_exc()}"
    story = cluster.clock.story() if broken else []
    return Outcome(seed, broken, story, cluster.clock.now, cluster.clock.events, cluster.faults)
