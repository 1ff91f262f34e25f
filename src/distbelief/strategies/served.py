"""ps:sync on a worker: shards are computed as in allreduce; the sums go to servers, which apply the step.

Workers hold no state but a copy of the values. So a worker's death costs nothing but its part of the step under way:
partial sums that had reached the servers count, whoever made them, and the others compute what is missing.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from distbelief.comm.alone import AloneExchange
from distbelief.comm.exchange import ROW, Geometry, Held, Source
from distbelief.comm.segment import Segment
from distbelief.comm.served import ServedGroup
from distbelief.comm.serverwords import (
    Fetch,
    Fetched,
    Go,
    Letter,
    Look,
    Looked,
    Measure,
    Measured,
    Node,
    Note,
    Question,
)
from distbelief.errors import DistBeliefError
from distbelief.job import Job
from distbelief.shards import Range, Schedule, shard_seed
from distbelief.strategies.agreement import agree_on_state
from distbelief.strategies.asynchronous import AsynchronousReplica
from distbelief.strategies.base import (
    Applied,
    BeginFrom,
    RolledBack,
    Seat,
    StepResult,
    Takeover,
    Task,
    nothing_saved,
)
from distbelief.strategies.base import (
    Fetch as FetchBatch,
)
from distbelief.strategies.committed import CommittedModel
from distbelief.strategies.compute import ShardComputer
from distbelief.strategies.layout import Layout
from distbelief.strategies.named import TilePortion, outside_of_tiles, whole_entries
from distbelief.strategies.parameterserver import ParameterServer
from distbelief.strategies.partials import ShardWork
from distbelief.strategies.prepared import PreparedAllReduce
from distbelief.strategies.reading import AlreadyCopied, read_portion
from distbelief.strategies.replica import DataParallelReplica
from distbelief.strategies.slicing import SliceShape, cut
from distbelief.strategies.state import ReplicaState
from distbelief.strategies.takeover import StepWork, plan_step, plan_takeover
from distbelief.strategies.tileoptimizer import Recipe
from distbelief.strategies.verdict import judge_rows

REMEMBERED = 1024  # steps, as the servers remember


class PreparedServed(PreparedAllReduce):
    def __init__(self, job: Job, schedule: Schedule, device: torch.device, strategy: ParameterServer) -> None:
        super().__init__(job, schedule, device, strategy.exact)
        self.strategy = strategy

    def geometry(self, ranges: Sequence[Range]) -> Geometry:
        usual = super().geometry(ranges)
        if self.strategy.waits:
            return usual
        return replace(usual, slots=[min(self.strategy.n_push, 2)] * len(ranges))

    def slices(self) -> list[SliceShape]:
        return cut(self._layout, self._recipe)

    def integer_numbers(self, content: bytes) -> np.ndarray:
        """The integer buffers as numbers, each as int64."""
        found = []
        for _, buffer in self.model.named_buffers():
            if not buffer.is_floating_point() and buffer.numel():
                size = buffer.numel() * buffer.element_size()
                part, content = bytearray(content[:size]), content[size:]
                found.append(torch.frombuffer(part, dtype=buffer.dtype).to(torch.int64).numpy())
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def recipe(self) -> Recipe:
        return self._recipe

    def first_state(self, begin_from: BeginFrom) -> ReplicaState:
        """All of what the servers begin with, in memory of its own."""
        alone = AloneExchange(replace(self.geometry([(0, self._schedule.shards)]), slots=[0]))
        state = ReplicaState(self._layout, self._recipe, alone, len(self._computer.integer_bytes()))
        agree_on_state(state, alone, self._computer, self._recipe, begin_from)
        return state

    def build(  # type: ignore[override]
        self, seat: Seat, exchange: Any, fetch: FetchBatch, begin_from: BeginFrom = nothing_saved
    ) -> ServedReplica | AsynchronousReplica | DataParallelReplica:
        """Without servers (one process that computes a step again) it is allreduce: the bits are the same."""
        if not isinstance(exchange, ServedGroup):
            return super().build(seat, exchange, fetch, begin_from)
        if not self.strategy.waits:
            return AsynchronousReplica(
                self._computer, self._recipe, self._schedule, seat, exchange, fetch, self.strategy
            )
        return ServedReplica(self._computer, self._recipe, self._schedule, seat, exchange, fetch)


class _Found(msgspec.Struct):
    """What the member of rank 0 found on the servers when its generation began: all members go on from it."""

    version: int
    nodes: list[Range]
    """Partial sums of the next step that every slice has."""


class ServedReplica:
    """See `Replica`."""

    def __init__(
        self, computer: ShardComputer, recipe: Recipe, schedule: Schedule, seat: Seat, exchange: ServedGroup,
        fetch: FetchBatch,
    ) -> None:  # fmt: skip
        self.exchange = exchange
        self.comm_s = 0.0
        self._computer = computer
        self._job = computer.job
        self._recipe = recipe
        self._schedule = schedule
        self._seat = seat
        self._fetch = fetch
        self._client = exchange.client
        self._slices = cut(computer.layout, recipe)
        self._values = exchange.memory("values", computer.layout.size_bytes)
        self._segments: dict[str, torch.Tensor] = {}
        computer.bind_parameters(self._values, 0)
        self._buffers = computer.committed_buffers(self._values, 0)
        self._whole = CommittedModel(computer, self._buffers)
        self._past: deque[Applied] = deque(maxlen=REMEMBERED)
        self._note: tuple[int, bytes] = (-1, b"")
        self._rows = np.zeros((schedule.shards, ROW))
        self._touched = np.zeros(len(computer.layout.entries), np.uint8)
        self._ahead: tuple[int, Any] = (-1, None)
        self._work = lru_cache(maxsize=4)(self._plan)
        self._slot_tiles: dict[int, list[torch.Tensor]] = {}
        self._takeover: tuple[int, StepWork] | None = None
        self._rolled_back: RolledBack | None = None
        self._join()

    def _join(self) -> None:
        """Go on from where the servers are."""
        self._client.restart()
        self.exchange.gather(b"")  # everybody has left the generation before
        looked = self._look()
        found = _Found(min(one.version for one in looked), _on_all(looked, self._schedule.shards))
        found = msgspec.msgpack.decode(self.exchange.gather(msgspec.msgpack.encode(found))[0], type=_Found)
        first = looked[0]
        self._applied = found.version
        for one in first.past:
            if one.step < found.version:
                self._remember(one.step, np.frombuffer(one.rows).reshape(-1, ROW), one.at, generation=0)
        self._note = first.note
        self._reached = np.frombuffer(self.exchange.memory("reached", 8).buffer, np.int64, 1)
        step, complete = found.version, False
        if step < self._seat.steps:
            held = [Held(node, Source(0, 0)) for node in found.nodes]
            occupied = self._schedule.occupied(step)
            work = plan_takeover(self._schedule.shards, occupied, held, self.exchange.size, self._seat.rank)
            if held:
                self._takeover = (step, work)
            complete = work.recomputed == 0
        if complete:  # some slices may have applied it already: nothing is computed before all have
            self._computer.commit_integers(first.integers or None)
        else:
            self._bring(found.version)
        self.exchange.gather(b"")  # nobody goes on before all know where they are
        if found.version < self._reached[0]:  # not before: a generation that is given up here tells nobody of it
            self._rolled_back = RolledBack(int(self._reached[0]), found.version, "checkpoint")
        self._reached[0] = found.version

    def _look(self) -> list[Looked]:
        found: dict[int, Looked] = {}
        self._ask(Look, lambda letter: found.__setitem__(letter.message.slice, letter.message))
        return [found[shape.number] for shape in self._slices]

    def _ask(self, make: Callable[[int, int], Question], each: Callable[[Letter], None]) -> None:
        """Ask about every slice."""
        client, abort = self._client, self.exchange.abort
        there = client.slices(abort)
        if there != len(self._slices):
            raise DistBeliefError(f"the servers have {there} slices, this worker {len(self._slices)}: not the same job")
        client.ask([partial(_about, make, shape.number) for shape in self._slices], abort, each)

    # --- what is known -----------------------------------------------------------------------------------------------

    def steps_applied(self) -> int:
        return self._applied

    def taken_over(self) -> Takeover | None:
        return Takeover(self._takeover[0], self._takeover[1].recomputed) if self._takeover else None

    def remembered(self, first: int) -> list[Applied]:
        return [one for one in list(self._past) if one.step >= first]

    def note(self) -> tuple[int, bytes]:
        return self._note

    def keep_note(self, content: bytes) -> None:
        self._note = (self._applied, content)
        if self.exchange.rank == 0:
            self._client.push(0, Note(self._applied, content))
            self._client.settle(self.exchange.abort)

    def rolled_back(self) -> RolledBack | None:
        return self._rolled_back

    def waits(self) -> Mapping[int, float]:
        return {}

    def traffic(self) -> tuple[int, int]:
        return 0, 0

    def plan_lines(self) -> Sequence[str]:
        return ()

    # --- a step ------------------------------------------------------------------------------------------------------

    def _plan(self, occupied: int) -> StepWork:
        return plan_step(self._schedule.shards, occupied, self._seat.ranges, self._seat.rank)

    def _work_of(self, step: int) -> StepWork:
        if self._takeover and self._takeover[0] == step:
            return self._takeover[1]
        return self._work(self._schedule.occupied(step))

    def _leaves_out_somebody(self, step: int) -> bool:
        """Whether a member has no shard in the step."""
        if self._takeover and self._takeover[0] == step:
            return self._takeover[1].recomputed < self.exchange.size
        occupied = self._schedule.occupied(step)
        return any(min(end, occupied) <= first for first, end in self._seat.ranges)

    def compute(self, step: int) -> None:
        self.exchange.begin(step)
        self._rows.fill(0)
        self._touched.fill(0)
        work = self._work_of(step).partials.work
        for number, unit in enumerate(work):
            self._compute_unit(step, unit, last=number + 1 == len(work))

    def _compute_unit(self, step: int, unit: ShardWork, last: bool) -> None:
        ahead, self._ahead = self._ahead, (-1, None)
        self.exchange.working(unit.shard)
        batch, samples = ahead[1] if ahead[0] == step else self._fetch(step, unit.shard, unit.shard + 1)
        slot, _ = self.exchange.slot(unit.slot)
        seed = shard_seed(self._job.seed, step, unit.shard)
        views = self._tile_views

        def tile_ready(tile: int) -> None:
            for into, other in unit.additions:
                views(into)[tile].add_(views(other)[tile])

        result = self._computer.run(batch, samples, seed, slot, self._buffers, tile_ready)
        self.exchange.working(-1)
        self._rows[unit.shard] = (result.loss_sum, result.weight, result.integers, samples)
        self._touched |= result.touched

    def _tile_views(self, slot: int) -> list[torch.Tensor]:
        if slot not in self._slot_tiles:
            segment, _ = self.exchange.slot(slot)
            tiles = self._computer.layout.tiles
            self._slot_tiles[slot] = [segment.tensor(t.dtype, t.offset_bytes, t.numel) for t in tiles]
        return self._slot_tiles[slot]

    def commit(self, step: int) -> StepResult:
        started = time.perf_counter()
        work = self._work_of(step)
        if self._leaves_out_somebody(step):  # nothing holds the others back until it, too, has all of the step before
            self.exchange.gather(b"")
        for node, slot in work.partials.results.items():
            self._push(step, node, slot)
        self._client.flush()
        self._look_ahead(step + 1)
        if self.exchange.rank == 0:
            factor = self._limit(step)
            for shape in self._slices:
                self._client.push(shape.number, Go(step, factor))
        result = self._bring(step + 1)
        assert result is not None
        self.exchange.forget_past()
        self.comm_s += time.perf_counter() - started
        return result

    def _push(self, step: int, node: Range, slot: int) -> None:
        segment, name = self.exchange.slot(slot)
        rows, touched = self._rows[node[0] : node[1]].tobytes(), self._touched.tobytes()
        integers = self._computer.integer_bytes() if node[0] == 0 else b""
        content = Node(step, *node, rows, touched, integers, name)
        for shape in self._slices:
            payload = None if name else segment.view(shape.first_byte, shape.value_bytes)
            self._client.push(shape.number, content, payload)

    def _limit(self, step: int) -> float:
        """What the gradients are multiplied by. It is known when all slices have all sums of the step: so this is also
        how the first member learns that the step may be applied."""
        squares: dict[int, list[float]] = {}

        def measured(letter: Letter) -> None:
            message: Measured = letter.message
            squares[message.slice] = message.squares

        self._ask(partial(_measure, step), measured)
        if self._job.clip_norm is None:
            return 1.0
        norm = math.sqrt(math.fsum(one for some in squares.values() for one in some))
        return min(1.0, self._job.clip_norm / (norm + 1e-6))

    def _bring(self, version: int) -> StepResult | None:
        """Bring the values to that version. Returns what the step before it gave, if the servers still know."""
        told: dict[int, Fetched] = {}

        def fetched(letter: Letter) -> None:
            message: Fetched = letter.message
            told[message.slice] = message
            if message.version >= 0:
                self._take(self._slices[message.slice], message, letter.payload)

        self._ask(partial(_fetch, version, not self.exchange.maps), fetched)
        first = told[0]
        rows = np.frombuffer(first.rows).reshape(-1, ROW) if first.rows else None
        result = judge_rows(version - 1, rows) if rows is not None else None
        if any(one.version < 0 for one in told.values()):
            raise DistBeliefError(f"step {version - 1} cannot be applied")
        self._computer.commit_integers(first.integers or None)
        self._applied = version
        self._reached[0] = max(int(self._reached[0]), version)
        if result and rows is not None:
            self._remember(version - 1, rows, time.time(), self._seat.generation)
        return result

    def _take(self, shape: SliceShape, message: Fetched, payload: Any) -> None:
        into = self._values.tensor(torch.uint8, shape.first_byte, shape.value_bytes)
        if not message.segment:
            into.copy_(torch.frombuffer(payload, dtype=torch.uint8))
            return
        if message.segment not in self._segments:
            self._segments[message.segment] = self.exchange.values(message.segment, shape.value_bytes)
        into.copy_(self._segments[message.segment])

    def _remember(self, step: int, rows: np.ndarray, at: float, generation: int) -> None:
        if not self._past or self._past[-1].step < step:
            given = judge_rows(step, rows)
            self._past.append(Applied(step, given.loss, given.samples, given.fingerprint, generation, at))

    def _look_ahead(self, step: int) -> None:
        """Fetch the next step's first batch while servers and others finish this one."""
        if step < self._seat.steps:
            work = self._work(self._schedule.occupied(step)).partials.work
            if work:
                self._ahead = (step, self._fetch(step, work[0].shard, work[0].shard + 1))

    # --- the state ---------------------------------------------------------------------------------------------------

    @cached_property
    def _portions(self) -> list[TilePortion]:
        """Every member saves some slices; the first one also what lies in no tile."""
        size = self.exchange.size
        outside = whole_entries(self._outside())
        return [
            TilePortion(
                self._computer.layout,
                self._recipe,
                [tile for shape in self._slices[rank::size] for tile in shape.tiles],
                outside if rank == 0 else [],
            )
            for rank in range(size)
        ]

    def _outside(self) -> dict[str, torch.Tensor]:
        return outside_of_tiles(self._computer.model, self._computer.layout, self._computer.integer_bytes())

    def portions(self) -> Sequence[TilePortion]:
        return self._portions

    def copy_portion(self, applied: int, into: Segment) -> AlreadyCopied:
        """From the servers: they have the optimizer's state. Nobody can change it before this member has gone on."""
        rank = self.exchange.rank
        self._whole.restore()
        return read_portion(
            self._client, self.exchange.abort, self._slices[rank :: self.exchange.size], self._portions[rank], into,
            self._outside() if rank == 0 else {}, applied,
        )  # fmt: skip

    def measure(self, tasks: Sequence[Task], measure: Callable[[Task, Any, Any], None]) -> None:
        rank, size = self.exchange.rank, self.exchange.size
        self._whole.measure(tasks[rank * len(tasks) // size : (rank + 1) * len(tasks) // size], measure)

    def save_weights(self, path: Path) -> None:
        if self.exchange.rank == 0:
            self._whole.save(path)

    def weights_sha256(self) -> str:
        return self._whole.sha256()


def _on_all(looked: Sequence[Looked], shards: int) -> list[Range]:
    """The shards of the step under way that all slices have in some partial sum, one by one. If a slice has applied the
    step, all others have all of them: it was not applied before."""
    version = min(one.version for one in looked)
    if any(one.version > version for one in looked):
        return [(0, shards)]
    there = [{shard for first, end in one.nodes for shard in range(first, end)} for one in looked]
    return [(shard, shard + 1) for shard in sorted(set.intersection(*there))]


def _about(make: Callable[[int, int], Question], number: int, ticket: int) -> Question:
    return make(ticket, number)


def _fetch(version: int, inline: bool, ticket: int, number: int) -> Question:
    return Fetch(ticket, number, version, inline)


def _measure(step: int, ticket: int, number: int) -> Question:
    return Measure(ticket, number, step)
