"""What must never happen, whatever fails. The virtual cluster reports what it does; a broken promise raises Broken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distbelief.control import messages as m
from distbelief.worker.rules.control import Action, TrainGeneration, WorkerState
from tests.sim.reference import Reference


class Broken(Exception):
    """A promise was broken."""


class Invariants:
    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self.met = 0
        """The newest generation whose members have all met: from then on nobody of an older one may write."""
        self.applied = 0
        """Steps that are wholly applied to the shared state."""
        self.applications: dict[int, int] = {}
        """Step -> in which generation it was applied first."""
        self._reached: dict[int, int] = {}
        self._generations: dict[int, m.StartGeneration] = {}
        self._compared: m.StartGeneration | None = None
        self._trained: dict[int, int] = {}
        self._visits: dict[int, int] = {}
        self._overtime: dict[int, tuple[int, int]] = {}
        self._sealed: set[int] = set()

    # --- the control plane -------------------------------------------------------------------------------------------

    def told(self, start: m.StartGeneration) -> None:
        """A number is used for one generation only, also by a coordinator that has forgotten the first."""
        known = self._generations.setdefault(start.generation, start)
        if known is start or self._compared is start:
            return
        self._compared = start
        if (known.members, known.past) != (start.members, start.past):
            raise Broken(
                f"generation {start.generation} was announced twice with different members: "
                f"{[one.worker for one in known.members]} in epoch {known.epoch}, "
                f"then {[one.worker for one in start.members]} in epoch {start.epoch}"
            )

    def generation(self, number: int) -> m.StartGeneration:
        return self._generations[number]

    def members_that_met(self) -> Sequence[m.Member]:
        return self._generations[self.met].members if self.met else ()

    def obeyed(self, before: WorkerState, event: Any, after: WorkerState, actions: Sequence[Action]) -> None:
        epoch = getattr(event, "epoch", before.epoch)
        if epoch < before.epoch and (actions or after != before):
            raise Broken(f"worker {before.worker} of epoch {before.epoch} obeyed {event}")
        if after.epoch < before.epoch or after.generation < before.generation:
            raise Broken(f"worker {before.worker} went back from {before} to {after}")
        for action in actions:
            if isinstance(action, TrainGeneration):
                last = self._trained.get(before.worker, 0)
                if action.generation <= last:
                    raise Broken(f"worker {before.worker} trains generation {action.generation} after {last}")
                self._trained[before.worker] = action.generation

    # --- the data plane ----------------------------------------------------------------------------------------------

    def all_met(self, generation: int) -> None:
        if generation < self.met:
            raise Broken(f"generation {generation} began after generation {self.met} had begun")
        self.met = generation

    def goes_on(self, generation: int, what: str) -> None:
        """All members of a generation have come to this point together."""
        if generation < self.met:
            raise Broken(f"generation {generation} goes on ({what}) although generation {self.met} has begun")

    def writes(self, worker: int, generation: int, what: str, step: int) -> None:
        """A member writes where others read."""
        if generation < self.met:
            raise Broken(
                f"worker {worker} of generation {generation} {what} (step {step}) "
                f"although generation {self.met} has begun"
            )

    def begins(self, worker: int, generation: int, known: int, step: int) -> None:
        """A member begins a step: it may finish one of a generation that is over, but not go on and on. `known`: the
        newest generation that all members of its own have heard of."""
        last, count = self._overtime.get(worker, (0, 0))
        count = (count + 1 if last == generation else 1) if known > generation else 0
        self._overtime[worker] = generation, count
        if count > 1:
            raise Broken(
                f"worker {worker} begins step {step} in generation {generation} long after all have heard of {known}"
            )

    def summed(self, step: int, generation: int, total: int, fingerprint: str, counted: Sequence[int]) -> None:
        """The members of a generation have added up a step."""
        expected = list(range(self._reference.occupied[step]))
        if sorted(counted) != expected:
            wrong = sorted(set(expected) ^ set(counted)) or sorted({v for v in counted if list(counted).count(v) > 1})
            raise Broken(f"step {step} in generation {generation}: shards {wrong} are not counted exactly once")
        if (total, fingerprint) != (self._reference.totals[step], self._reference.fingerprints[step]):
            raise Broken(f"step {step} has another fingerprint in generation {generation} than it must have")
        self._visits[step] = self._reference.samples(step)

    def wrote_tile(self, step: int, generation: int, tile: int, value: int) -> None:
        if value != self._reference.states[step + 1][tile]:
            raise Broken(f"tile {tile} has other bits after step {step} in generation {generation} than it must have")

    def stands_at(self, applied: int, generation: int) -> None:
        """So many steps are wholly applied to the shared state."""
        if applied < self.applied:
            raise Broken(f"step {self.applied - 1} was wholly applied and is undone in generation {generation}")
        for step in range(self.applied, applied):
            self.applications.setdefault(step, generation)
        self.applied = applied

    def replica_at(self, worker: int, applied: int, generation: int) -> None:
        """So many steps are applied to a worker's own replica."""
        reached = self._reached.get(worker, 0)
        if applied < reached:
            raise Broken(
                f"worker {worker}, alive and reachable, had applied {reached} steps and has {applied} of them "
                f"in generation {generation}"
            )
        self._reached[worker] = applied
        for step in range(reached, applied):
            self.applications.setdefault(step, generation)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def asked_to_seal(self, command: m.SealCheckpoint) -> None:
        """The parts must be those of all members of one generation, by rank."""
        owners = [tuple(map(int, part.sha256.split("/"))) for part in command.parts]
        generation, _, members = owners[0]
        if owners != [(generation, rank, members) for rank in range(members)]:
            raise Broken(f"step {command.step} is to be sealed from parts (generation, rank, of how many) {owners}")
        if members != len(self._generations[generation].members):
            raise Broken(f"step {command.step} is to be sealed without parts of all members")

    def sealed(self, step: int, tiles: Sequence[tuple[int, int]]) -> None:
        """A manifest is written over these tiles."""
        if sorted(tiles) != list(enumerate(self._reference.states[step])):
            raise Broken(f"the checkpoint of step {step} does not hold the state after {step} steps")
        self._sealed.add(step)

    def recorded(self, step: int) -> None:
        if step not in self._sealed:
            raise Broken(f"a checkpoint of step {step} is on record, which was never sealed")

    def everybody_is_gone(self) -> None:
        """And their memory: what is loaded from a checkpoint is the state from now on."""
        self.applied = 0

    # --- the end -----------------------------------------------------------------------------------------------------

    def completed(self, generation: int, knows: dict[int, int]) -> None:
        """`knows`: live worker -> the newest generation it has heard of."""
        steps = len(self._reference.totals)
        missing = [step for step in range(steps) if step not in self.applications]
        if missing:
            raise Broken(f"the run is over, but the steps {missing} were never applied")
        if sum(self._visits.values()) != self._reference.all_samples:
            raise Broken(f"{sum(self._visits.values())} samples were visited instead of {self._reference.all_samples}")
        behind = sorted(worker for worker, known in knows.items() if known != generation)
        if behind:
            raise Broken(f"the run ended in generation {generation}, of which the workers {behind} know nothing")
