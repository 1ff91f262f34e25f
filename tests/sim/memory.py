"""The memory that members share, as values: ledgers of generations and the state, with a place aside for each rank.

The rules are those of transport/shm/controlblock.py, transport/shm/exchange.py and
strategies/flatmodel/state.py. A ledger survives the members that wrote it. What is being written
is TORN until its writer has finished; a writer that dies in between leaves it torn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from distbelief.shards import Program, Range, program
from distbelief.strategies.flatmodel.rules.stepwork import (
    Partials,
    StepWork,
    _runs,
    _together,
    partial_sums,
    plan_step,
    plan_takeover,
)
from distbelief.transport.exchange import PublishedSum, Source
from distbelief.worker.rules.control import TrainGeneration
from tests.sim.invariants import Broken, Invariants
from tests.sim.reference import Reference, add, fingerprint_of, updated
from tests.sim.storage import History

TORN = -1
Key = tuple[str, int]


@dataclass
class Sum:
    """What the members of a generation have added up for one step."""

    total: int
    fingerprint: str


@dataclass
class Plan:
    """What everybody computes in a step, and how it is added."""

    everybody: Sequence[Partials]
    mine: Sequence[Sequence[Range]]
    sources: Sequence[Source]
    nodes: Sequence[Range]
    order: Program
    recomputed: int = -1
    """-1: an ordinary step."""


class Ledger:
    """A generation's words, rows, nodes and slots."""

    def __init__(self, generation: int, ranges: Sequence[Range], shards: int) -> None:
        self.generation = generation
        self.ranges = ranges
        self.size = len(ranges)
        self.shards = shards
        self.announced: dict[Key, set[int]] = {}
        self.begun = [0] * self.size
        self.working = [0] * self.size
        self.arrived = [0] * self.size
        self.rows: dict[int, int] = {}
        self.nodes: list[list[tuple[Range, int]]] = [[] for _ in ranges]
        self.slots: dict[tuple[int, int], int] = {}
        self.sums: dict[int, Sum] = {}
        self.broken = False
        """A connection of this group is broken (private replicas only)."""
        self.letters: dict[int, tuple[bool, int]] = {}
        self.given: History = {}
        """What the member gives that has the furthest state (private replicas only)."""
        self.taken: dict[int, Plan | None] = {}
        """What is done about a step that others began; None: nobody had begun it."""
        self._plans: dict[int, Plan] = {}

    def announce(self, rank: int, key: Key) -> bool:
        """Whether everybody has announced it now. Over connections that are broken nobody is told anything."""
        if self.broken:
            return False
        there = self.announced.setdefault(key, set())
        there.add(rank)
        return len(there) == self.size

    def complete(self, key: Key) -> bool:
        return len(self.announced.get(key, ())) == self.size

    def plan(self, occupied: int) -> Plan:
        """An ordinary step, by the rules of strategies/flatmodel/rules/stepwork.py."""
        if occupied not in self._plans:
            everybody = [partial_sums(self.shards, occupied, mine) for mine in self.ranges]
            found = _found(everybody, [])
            made = Plan(everybody, [[mine] for mine in self.ranges], *_sorted(found, self.shards, occupied))
            _same(made, plan_step(self.shards, occupied, self.ranges, occupied % self.size), occupied % self.size)
            self._plans[occupied] = made
        return self._plans[occupied]


class SharedMemory:
    """The keeper's table: ledgers by generation, and the one state."""

    def __init__(self, reference: Reference, tiles: int, invariants: Invariants) -> None:
        self.reference = reference
        self.tiles = tiles
        self.ledgers: dict[int, Ledger] = {}
        self.initialised = False
        self.values = [TORN] * tiles
        self.stamps = [0] * tiles
        self.history: History = {}
        self._aside: dict[int, tuple[int, int, int]] = {}
        """Rank -> the tile that it had open last, before which step, and what was in it."""
        self._invariants = invariants

    def ledger(self, action: TrainGeneration) -> Ledger:
        generation = action.generation
        if generation not in self.ledgers:
            self.ledgers[generation] = Ledger(generation, action.ranges, self.reference.schedule.shards)
        return self.ledgers[generation]

    @property
    def steps_applied(self) -> int:
        return min(self.stamps) // 2

    def begin_at(self, step: int, history: History, generation: int) -> None:
        """Write the first state: that of a checkpoint, or, after 0 steps, the initial one."""
        self.values = list(self.reference.states[step])
        self.stamps = [2 * step] * self.tiles
        self.history |= history
        self.initialised = True
        self._invariants.stands_at(step, generation)

    @property
    def is_applied_in_part(self) -> bool:
        return max(self.stamps) > 2 * self.steps_applied

    def has(self, tile: int, step: int) -> bool:
        return self.stamps[tile] >= 2 * step + 2

    def open(self, tile: int, step: int, rank: int) -> None:
        self._aside[rank] = tile, step, self.values[tile]
        self.stamps[tile] = 2 * step + 1
        self.values[tile] = TORN

    def close(self, tile: int, step: int, rank: int, total: int, generation: int) -> None:
        # The writer's sum is right here: whatever was in the tile before is what it works on.
        self.values[tile] = updated(self._aside[rank][2], total, tile, step)
        self.stamps[tile] = 2 * step + 2
        self._invariants.wrote_tile(step, generation, tile, self.values[tile])
        self._invariants.stands_at(self.steps_applied, generation)

    def repair(self, generation: int) -> None:
        for tile, step, before in self._aside.values():
            if self.stamps[tile] == 2 * step + 1:
                self.values[tile], self.stamps[tile] = before, 2 * step
        self._invariants.stands_at(self.steps_applied, generation)
        states = self.reference.states
        if any(stamp % 2 or self.values[t] != states[stamp // 2][t] for t, stamp in enumerate(self.stamps)):
            raise Broken(f"generation {generation} repaired a tile to other bits than after so many steps")


# --- what earlier generations have left ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Past:
    ledgers: dict[int, Ledger] = field(default_factory=dict)
    """How many generations back -> what it has left."""

    def held(self, step: int) -> list[PublishedSum] | None:
        if not any(begun == step + 1 for ledger in self.ledgers.values() for begun in ledger.begun):
            return None
        return [
            PublishedSum(node, Source(rank, slot, back))
            for back, ledger in self.ledgers.items()
            for rank in range(ledger.size)
            if trusted(ledger, rank, step + 1)
            for node, slot in ledger.nodes[rank]
        ]

    def of(self, ledger: Ledger, source: Source) -> Ledger:
        return self.ledgers[source.back] if source.back else ledger


def trusted(ledger: Ledger, rank: int, stamp: int) -> bool:
    """Whether that member has published its whole part of the step."""
    return ledger.arrived[rank] == stamp


def takeover(ledger: Ledger, occupied: int, held: Sequence[PublishedSum]) -> Plan:
    """By the rules of strategies/flatmodel/rules/stepwork.py; computed once for all members instead of by each."""
    there = {shard for one in held for shard in range(*one.node)}
    missing = [shard for shard in range(occupied) if shard not in there]
    size = ledger.size
    parts = [missing[r * len(missing) // size : (r + 1) * len(missing) // size] for r in range(size)]
    mine = [_runs(part) for part in parts]
    everybody = [_together([partial_sums(ledger.shards, occupied, run) for run in runs]) for runs in mine]
    found = _found(everybody, held)
    made = Plan(everybody, mine, *_sorted(found, ledger.shards, occupied), recomputed=len(missing))
    rank = len(missing) % size
    _same(made, plan_takeover(ledger.shards, occupied, held, size, rank), rank)
    return made


def _found(everybody: Sequence[Partials], held: Sequence[PublishedSum]) -> list[tuple[Range, Source]]:
    found = [(one.node, one.source) for one in held]
    for owner, partials in enumerate(everybody):
        found += [(node, Source(owner, slot)) for node, slot in partials.results.items()]
    found.sort(key=lambda pair: pair[0])
    return found


def _sorted(
    found: Sequence[tuple[Range, Source]], shards: int, occupied: int
) -> tuple[list[Source], list[Range], Program]:
    nodes = [node for node, _ in found]
    order = program(shards, occupied, {node: number for number, node in enumerate(nodes)})
    return [source for _, source in found], nodes, order


def _same(made: Plan, work: StepWork, rank: int) -> None:
    """The plan made once for all must be the one that the real function makes for this rank."""
    assert list(work.sources) == list(made.sources)
    assert work.order == made.order
    assert work.partials == made.everybody[rank]


def add_up(ledger: Ledger, past: Past, plan: Plan, step: int, occupied: int) -> tuple[Sum, list[int]]:
    """The sum of all partial sums, the fingerprint of all rows, and the shards that were counted."""
    values = [past.of(ledger, source).slots.get((source.rank, source.slot), TORN) for source in plan.sources]

    def visit(node: Program) -> int:
        return values[node] if isinstance(node, int) else add(visit(node[0]), visit(node[1]))

    rows: dict[int, int] = {}
    counted: list[int] = []
    for node, source in zip(plan.nodes, plan.sources, strict=True):
        giver = past.of(ledger, source)
        for shard in range(node[0], min(node[1], occupied)):
            counted.append(shard)
            rows[shard] = giver.rows.get(shard, TORN)
    fingerprint = fingerprint_of([rows.get(shard, TORN) for shard in range(occupied)])
    return Sum(visit(plan.order), fingerprint), counted
