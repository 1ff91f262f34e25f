"""Carries faults out: kills, freezes, cuts and requests, as processes, people and networks do.

It spares whom the rules would rightly give up: a run may end when three workers die before it has begun, or when one
shard kills two workers.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s
from tests.sim.faults import Fault, Kind
from tests.sim.memory import Key, Ledger
from tests.sim.worker_model import VirtualWorker

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

HOST = "host"
"""Where the engine is. Workers that somebody starts by hand may be elsewhere."""
MOST_EARLY_DEATHS = 2
MOST_LIVES = 4
LOADING_S = 8.0
"""The longest freeze of a worker that no coordinator knows to be ready."""
HOUR_S = 3600.0
ASKER = -4
"""Who asks for checkpoints from outside."""


class Mischief:
    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self.done = Counter[str]()
        self._cluster = cluster
        self._rng = rng
        self._wanted = cluster.setting.members
        self._asked: int | None = None
        self._early_deaths = 0
        self._kills_at_change = 0
        self._kills_at_the_end = 0
        self._lives = 1
        self._shard_deaths: set[tuple[int, int]] = set()

    def inject(self, fault: Fault) -> None:
        cluster, kind = self._cluster, fault.kind
        cluster.clock.note("fault: {}", fault)
        self.done[kind] += 1
        if kind == "kill coordinator":
            cluster.coordinator.die()
        elif kind == "kill coordinator while it decides":
            self._kill_while_it_decides()
        elif kind == "freeze coordinator":
            if cluster.coordinator.alive:
                cluster.coordinator.frozen = True
                cluster.clock.after(min(fault.duration_s, 8.0), cluster.coordinator.wake)
        elif kind == "kill at the next change":
            self._kills_at_change += 1
        elif kind == "kill when it has finished":
            self._kills_at_the_end += 1
        elif kind == "join":
            if not self._gathering():  # before the start the run would wait for a guest that never comes
                self._wanted += 1
                cluster.from_client(m.JoinRequested(pid=self._rng.randrange(10_000)))
        elif kind == "save":
            cluster.from_client(m.CheckpointRequested(), sender=ASKER)
        elif kind == "bad disk":
            if cluster.storage:
                cluster.storage.bad_until = cluster.clock.now + min(fault.duration_s, 8.0)
        elif kind == "full disk":
            cluster.full_until = cluster.clock.now + fault.duration_s
            if cluster.storage and self._rng.random() < 0.5:  # the checkpoints lie on the same disk
                cluster.storage.bad_until = max(cluster.storage.bad_until, cluster.full_until)
        elif kind == "set clock":
            host = self._rng.choice(sorted(cluster.walls))
            cluster.walls[host] += self._rng.choice([-100.0, -3.0, -0.5, 0.5, 3.0, 100.0]) * HOUR_S
        elif kind in ("stop", "kill everything"):
            self._end_this_life(kind)
        elif kind == "scale":
            self._asked = max(1, cluster.setting.min_workers, self._wanted + fault.amount)
            self._ask_for_scale()
        else:
            there = [worker for worker in cluster.workers.values() if worker.alive]
            for worker in self._rng.sample(there, min(fault.amount, len(there))):
                self._hit(worker, fault)

    def _end_this_life(self, kind: Kind) -> None:
        """The run is resumed after it. Without checkpoints it would only start from its first step."""
        cluster = self._cluster
        if not cluster.storage or self._lives == MOST_LIVES or cluster.status:
            return
        if kind == "stop":
            cluster.stopping = True
        else:
            if self._rng.random() < 0.4:
                cluster.storage.damage_newest()
            cluster.everything_killed()

    def next_life(self, workers: int) -> None:
        self._lives += 1
        self._wanted = workers

    def _hit(self, worker: VirtualWorker, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                self._kill(worker)
            case "freeze":
                self._freeze(worker, fault.duration_s)
            case "slow":
                worker.slowness = self._rng.choice([2.0, 5.0])
            case "leave":
                if worker.ready or (worker.host == HOST and self._may_die(worker)):
                    worker.ask_to_leave()
            case "cut":
                self._cluster.network.cut(worker.number, fault.duration_s)

    def _freeze(self, worker: VirtualWorker, duration_s: float) -> None:
        known = self._cluster.coordinator.state.workers.get(worker.number)
        if self._gathering() or not self._cluster.coordinator.alive or known is None or not known.ready:
            duration_s = min(duration_s, LOADING_S)  # a worker that loads the job for ever is not given up by anybody
        if not self._is_guilty(worker):
            worker.freeze()
            if duration_s < float("inf"):
                self._cluster.clock.after(duration_s, worker.wake)

    def coordinator_died(self) -> None:
        """The next one waits for a worker without a recorded seat to load the job, though it was ready."""
        generations = [entry for entry in self._cluster.coordinator.records() if entry["kind"] == "generation"]
        seated = {member["worker"] for entry in generations for member in entry["members"]}
        for worker in self._cluster.workers.values():
            if worker.frozen and worker.number not in seated:
                self._cluster.clock.after(LOADING_S, worker.wake)

    def _kill(self, worker: VirtualWorker) -> None:
        # Of who comes by hand from elsewhere and dies on the way nobody ever hears; its place is kept for it.
        unseen = worker.host != HOST and worker.number not in self._cluster.coordinator.state.workers
        if not unseen and not self._is_guilty(worker) and self._may_die(worker):
            self._cluster.clock.note("worker {} is killed", worker.number)
            worker.exit(-9)

    def _gathering(self) -> bool:
        coordinator = self._cluster.coordinator
        if coordinator.alive and not coordinator.waits_for_room:
            return coordinator.state.phase == "gathering"
        # What a dead one had decided, or one that dies now, is nothing if it is not on record.
        told = [entry["kind"] for entry in coordinator.records() if entry["kind"] in ("generation", "resumed")]
        return told[-1:] != ["generation"]

    def _may_die(self, worker: VirtualWorker) -> bool:
        early = self._gathering() or not worker.ready
        self._early_deaths += early
        return not early or self._early_deaths <= MOST_EARLY_DEATHS

    def _is_guilty(self, worker: VirtualWorker) -> bool:
        """Whether the shard that it computes has killed somebody before."""
        return any(shard in self._shard_deaths for shard in self._computing(worker))

    def worker_died(self, worker: VirtualWorker) -> None:
        self._shard_deaths.update(self._computing(worker))

    def _computing(self, worker: VirtualWorker) -> list[tuple[int, int]]:
        """(step, shard) that it is in the middle of."""
        invariants, ledgers = self._cluster.invariants, self._cluster.around.memory.ledgers
        return [
            (ledger.begun[rank] - 1, shard - 1)
            for ledger in ledgers.values()
            for rank, shard in enumerate(ledger.working)
            if shard and invariants.generation(ledger.generation).members[rank].worker == worker.number
        ]

    def generation_met(self, ledger: Ledger, key: Key) -> None:
        """Everybody of a new generation is there: the moment for a kill that was kept for it."""
        if key == ("meet", 1) and self._kills_at_change:
            self._kills_at_change -= 1
            members = [one.worker for one in self._cluster.invariants.generation(ledger.generation).members]
            victim = self._cluster.workers[self._rng.choice(members)]
            self._cluster.clock.after(self._rng.random(), self._kill, victim)

    def finished(self, worker: VirtualWorker) -> None:
        """It has nothing left to do but to write its part of the last checkpoint."""
        if self._kills_at_the_end and self._cluster.storage:
            self._kills_at_the_end -= 1
            self._cluster.clock.after(self._rng.random() * self._cluster.storage.write_s, self._kill, worker)

    def _kill_while_it_decides(self) -> None:
        coordinator = self._cluster.coordinator

        def dies_at(outputs: list[s.Output]) -> int | None:
            kinds = [output.entry["kind"] for output in outputs if isinstance(output, s.Record)]
            if not kinds:
                return None
            coordinator.dies_at = lambda outputs: None
            return self._rng.randrange(len(outputs))

        coordinator.dies_at = dies_at

    def _ask_for_scale(self) -> None:
        """As a person would: again, until it is answered."""
        if self._asked is not None and not self._cluster.status:
            self._wanted = self._asked
            if self._cluster.coordinator.alive:
                self._cluster.from_client(m.ScaleRequested(self._asked))
            self._cluster.clock.after(2.0, self._ask_for_scale)

    def answered(self) -> None:
        self._asked = None
