"""`ps:sync` on a worker: it computes shards as in allreduce, and pushes partial sums to servers, which apply the step.

Workers hold no state: their parameters are a copy of the servers', or on one host the servers' own memory. So a
worker's death costs only its part of the step under way: partial sums that have reached the servers count, and the
other members compute the missing shards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import msgspec
import numpy as np
import torch

from distbelief.errors import DistBeliefError
from distbelief.shards import Range, Schedule, shard_seed
from distbelief.steadyclock import CLOCK
from distbelief.strategies.base import (
    Applied,
    Seat,
    StepResult,
    Takeover,
)
from distbelief.strategies.base import (
    Fetch as FetchBatch,
)
from distbelief.strategies.flatmodel.compute import ShardComputer, ShardResult
from distbelief.strategies.flatmodel.recheck import Recheck
from distbelief.strategies.flatmodel.rules.stepwork import (
    INTEGERS,
    ShardWork,
    StepWork,
    judge_rows,
    plan_step,
    plan_takeover,
)
from distbelief.strategies.flatmodel.tileoptimizer import Recipe
from distbelief.strategies.ps.protocol.client import Idle
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import (
    ApplyStep,
    Inspect,
    Inspected,
    MeasureStep,
    Note,
    PartialSum,
    PulledValues,
    PullValues,
    Question,
    StepMeasured,
)
from distbelief.strategies.ps.rules.gathering import shards_on_all_slices
from distbelief.strategies.ps.rules.slicing import SliceShape
from distbelief.strategies.ps.tables.remote import RemoteTables
from distbelief.strategies.ps.worker.exchange import ServerExchange
from distbelief.strategies.ps.worker.member import AlreadyCopied, ParameterServerMember
from distbelief.strategies.tables.rowgradients import RowGradients
from distbelief.transport.device.exchange import stretches, when_whole
from distbelief.transport.exchange import ROW, PublishedSum, Source
from distbelief.transport.shm.segment import Memory, Segment


class _Found(msgspec.Struct):
    """The state of the servers when the generation began, found by rank 0. All members continue from it."""

    version: int
    nodes: list[Range]
    """The shards of the next step that every slice has."""


class SynchronousReplica(ParameterServerMember):
    """See `Replica`."""

    _maps_values = True

    def __init__(
        self, computer: ShardComputer, recipe: Recipe, schedule: Schedule, seat: Seat, exchange: ServerExchange,
        fetch: FetchBatch, tables: RemoteTables,
    ) -> None:  # fmt: skip
        super().__init__(computer, recipe, schedule, seat, exchange, fetch, tables)
        tables.bind(self._client, exchange.abort, self.steps_applied)
        self._row_gradients: dict[int, Sequence[RowGradients]] = {}
        self._rows = np.zeros((schedule.shards, ROW))
        self._touched = np.zeros(len(computer.layout.entries), np.uint8)
        self._pushed: set[tuple[Range, int]] = set()
        """(partial sum, slice): pushes of this step that are done already."""
        self._slice_of = {tile: shape.number for shape in self._slices for tile in shape.tiles}
        # Over a network, slices are pushed while the rest of the backward pass is computed. In shared memory no bytes
        # travel, and pushes would only take processor time. A device is done long before the bytes are sent. The first
        # slice goes last, with the loss rows, and so do slices with buffers, which are not known earlier.
        last = computer.layout.parameter_tiles
        early = [shape for shape in self._slices[1:] if shape.tiles.stop <= last]
        early = [] if exchange.maps or exchange.apart else early
        self._early = {shape.number for shape in early}
        self._ahead: tuple[int, Any] = (-1, None)
        self._work = lru_cache(maxsize=4)(self._plan)
        self._grain = stretches(computer.layout.tiles, last, exchange.grain_bytes)
        self._rooms: dict[int, list[torch.Tensor]] = {}
        self._takeover: tuple[int, StepWork] | None = None
        self._join()
        self._recheck = Recheck(computer, seat, self._applied, self._gather, exchange.room, self._check)
        self._is_rechecked = False
        """Whether the step under way is rechecked: before any of its sums is pushed."""

    def _join(self) -> None:
        """Go on from the step at which the servers are."""
        self._client.restart()
        self._check_slices()
        self.exchange.gather(b"")  # all members have left the generation before
        looked = self._look()
        found = _Found(min(one.version for one in looked), shards_on_all_slices(looked, self._schedule.shards))
        found = msgspec.msgpack.decode(self.exchange.gather(msgspec.msgpack.encode(found))[0], type=_Found)
        first = looked[0]
        self._applied = found.version
        for one in first.past:
            if one.step < found.version:
                self._remember(one.step, np.frombuffer(one.rows).reshape(-1, ROW), one.at, generation=0)
        self._note = first.note
        step, complete = found.version, False
        if step < self._seat.steps:
            held = [PublishedSum(node, Source(0, 0)) for node in found.nodes]
            occupied = self._schedule.occupied(step)
            work = plan_takeover(self._schedule.shards, occupied, held, self.exchange.size, self._seat.rank)
            if held:
                self._takeover = (step, work)
            complete = work.recomputed == 0
            self._begin_generation(step, complete)
        if complete:  # some slices may have applied the step already: members wait until all have
            self._computer.commit_integers(first.integers or None)
        else:
            self._bring(found.version)
        self.exchange.gather(b"")  # no member continues before all know the step
        self._note_rollback()

    def _begin_generation(self, step: int, complete: bool) -> None:
        """Called before a member of this generation goes on. `complete`: the servers have all partial sums of the
        step."""

    def _look(self) -> list[Inspected]:
        found: dict[int, Inspected] = {}
        self._ask(Inspect, lambda framed: found.__setitem__(framed.message.slice, framed.message), self._everything)
        return [found[number] for number in self._everything]

    @property
    def _everything(self) -> Sequence[int]:
        """All slices: of the dense parameters, then of the tables."""
        return range(len(self._slices) + len(self._tables.slices))

    def _ask(
        self, make: Callable[[int, int], Question], each: Callable[[Framed], None], slices: Sequence[int],
        idle: Idle | None = None,
    ) -> None:  # fmt: skip
        questions = [partial(_about, make, number) for number in slices]
        self._client.ask(questions, self.exchange.abort, each, idle)

    def taken_over(self) -> Takeover | None:
        return Takeover(self._takeover[0], self._takeover[1].recomputed) if self._takeover else None

    def keep_note(self, content: bytes) -> None:
        self._note = (self._applied, content)
        if self.exchange.rank == 0:
            self._client.push(0, Note(self._applied, content))
            self._client.settle(self.exchange.abort)

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
        self._row_gradients.clear()
        self._begin(step)
        self._pushed.clear()
        self._is_rechecked = step == self._recheck.due
        if self._is_rechecked:
            self._recheck.begin(step, self._schedule.occupied(step), self._work_of(step))
        complete_with = self._work_of(step).partials.complete_with if self._early and not self._is_rechecked else {}
        for unit in self._units(step):
            self._compute_unit(step, unit, complete_with.get(unit.shard, []))
        if self._is_rechecked:
            self.news += self._recheck.compare(step, partial(self._compute_again, step))
        for slot in self._sums(step).values():
            self.exchange.bring(slot)

    def _compute_again(self, step: int) -> None:
        self._touched.fill(0)
        for unit in self._units(step):
            self._compute_unit(step, unit, ())

    def _check(self, step: int, shard: int, into: Memory) -> bytes:
        """Compute another member's shard. Returns what comes with its gradients."""
        self.exchange.working(shard)
        batch, samples = self._fetch(step, shard, shard + 1)
        seed, before_s = shard_seed(self._job.seed, step, shard), self._tables.comm_s
        result = self._computer.run(batch, samples, seed, into, self._buffers, lambda tile: None)
        self.comm_s += self._tables.comm_s - before_s
        self.exchange.working(-1)
        return _beside_gradients(result, samples)

    def _gather(self, payload: bytes) -> list[bytes]:
        started = time.perf_counter()
        found = self.exchange.gather(payload)
        self.comm_s += time.perf_counter() - started
        return found

    def _begin(self, step: int) -> None:
        """A step begins; for subclasses."""

    def _units(self, step: int) -> Iterable[ShardWork]:
        """The shards that this member computes, in order."""
        return self._work_of(step).partials.work

    def _sums(self, step: int) -> dict[Range, int]:
        """Partial sum that this member has computed -> its slot."""
        return self._work_of(step).partials.results

    def _meanwhile(self, step: int, told: Collection[int]) -> Idle | None:
        """Work for this member while it waits for others; for subclasses. `told`: slices whose new values have come."""
        return None

    def _compute_unit(self, step: int, unit: ShardWork, done: Sequence[tuple[Range, int]]) -> None:
        """`done`: the partial sums that are complete with this shard, and their slots."""
        ahead, self._ahead = self._ahead, (-1, None)
        self.exchange.working(unit.shard)
        batch, samples = ahead[1] if ahead[0] == step else self._fetch(step, unit.shard, unit.shard + 1)
        room = self.exchange.room(unit.slot)
        seed = shard_seed(self._job.seed, step, unit.shard)
        parts = self._parts
        left = [len(shape.tiles) for shape in self._slices] if done else []

        def ready(some: int) -> None:
            for into, other in unit.additions:
                parts(into)[some].add_(parts(other)[some])
            for tile in self._grain[some].tiles if done else ():
                number = self._slice_of[tile]
                left[number] -= 1
                if not left[number] and number in self._early:
                    self._push_early(step, number, done)

        def loss_known(loss_sum: float, weight: float) -> None:
            self._rows[unit.shard] = (loss_sum, weight, 0.0, samples)

        before_s = self._tables.comm_s
        given = batch, samples, seed, room, self._buffers, when_whole(self._grain, ready)
        result = self._computer.run(*given, loss_known if done else None)
        self.comm_s += self._tables.comm_s - before_s
        self.exchange.working(-1)
        self._rows[unit.shard] = (result.loss_sum, result.weight, result.integers, samples)
        self._touched |= result.touched
        self._row_gradients[unit.shard] = result.rows
        if self._is_rechecked:
            self._recheck.in_slot(unit.shard, room)
            self._recheck.reported(unit.shard, _beside_gradients(result, samples))

    def _parts(self, slot: int) -> list[torch.Tensor]:
        """The memory of a slot, in the pieces in which sums are added up."""
        if slot not in self._rooms:
            room = self.exchange.room(slot)
            self._rooms[slot] = [room.tensor(s.dtype, s.offset_bytes, s.numel) for s in self._grain]
        return self._rooms[slot]

    def commit(self, step: int) -> StepResult:
        started = time.perf_counter()
        if self._leaves_out_somebody(step):
            # A member without a shard is not waited for, so it may lack this step's values.
            self.exchange.gather(b"")
        for node, slot in self._sums(step).items():
            self._push(step, node, slot)
        self._sending(step)
        shards = sorted(self._row_gradients)
        found = [self._row_gradients[shard] for shard in shards]
        self._tables.push_step(step, shards, found, self._rows[shards].tobytes())
        self._client.flush()
        self._look_ahead(step + 1)
        if self.exchange.rank == 0:
            self._go(step, self._meanwhile(step, ()))
        result = self._bring(step + 1)
        assert result is not None
        self.exchange.forget_past()
        self.comm_s += time.perf_counter() - started
        return result

    def _sending(self, step: int) -> None:
        """All of the step is pushed, but slice 0's part has not left yet; for subclasses."""

    def _go(self, step: int, idle: Idle | None = None) -> None:
        """Tell all slices to apply the step."""
        factor = self._limit(step, idle)
        for number in self._everything:
            self._client.push(number, ApplyStep(step, factor))
        self._client.flush()

    def _push_early(self, step: int, number: int, done: Sequence[tuple[Range, int]]) -> None:
        """Push a slice while the rest of the backward pass is computed."""
        touched = self._touched.copy()
        now = self._computer.touched_so_far()  # final for the entries of this slice
        touched[: len(now)] |= now
        for node, slot in done:
            self._push(step, node, slot, touched, [self._slices[number]])
            self._pushed.add((node, number))
        self._client.flush()

    def _push(
        self, step: int, node: Range, slot: int, touched: np.ndarray | None = None,
        slices: Sequence[SliceShape] | None = None,
    ) -> None:  # fmt: skip
        """Push a partial sum to these slices, or to all that do not have it yet."""
        if slices is None:
            slices = [shape for shape in self._slices if (node, shape.number) not in self._pushed]
        _, name = self.exchange.slot(slot)
        rows = self._rows[node[0] : node[1]]
        touched = self._touched if touched is None else touched
        marks = touched.tobytes()
        integers = self._computer.integer_bytes() if node[0] == 0 else b""
        first = PartialSum(step, *node, rows.tobytes(), marks, integers, name)
        rows = rows.copy()
        rows[:, INTEGERS] = 0.0  # known only after the backward pass; slice 0 checks them for all
        others = PartialSum(step, *node, rows.tobytes(), marks, b"", name)
        for shape in slices:
            content, payload = self._packed(others if shape.number else first, shape, slot, touched)
            self._client.push(shape.number, content, payload)

    def _packed(self, node: PartialSum, shape: SliceShape, slot: int, touched: np.ndarray) -> tuple[PartialSum, Any]:
        """The message for a slice's stretch of a partial sum, and the payload, if it has one."""
        segment, name = self.exchange.slot(slot)
        return node, None if name else segment.view(shape.first_byte, shape.value_bytes)

    def _limit(self, step: int, idle: Idle | None = None) -> float:
        """The factor of the gradients (clipping by global norm). Its questions are answered when all slices have all
        sums of the step, so rank 0 also learns here that the step may be applied."""
        squares: dict[int, list[float]] = {}

        def measured(framed: Framed) -> None:
            message: StepMeasured = framed.message
            squares[message.slice] = message.squares

        self._ask(self._measure(step), measured, self._everything, idle)
        return self._job.clip_factor(math.sqrt(math.fsum(one for some in squares.values() for one in some)))

    def _measure(self, step: int) -> Callable[[int, int], Question]:
        return partial(measure_step, step, 0, 0)

    def _bring(self, version: int) -> StepResult | None:
        """Pull the values of this version. Returns the result of the step before it, if the servers still know it."""
        told: dict[int, PulledValues] = {}

        def fetched(framed: Framed) -> None:
            message: PulledValues = framed.message
            told[message.slice] = message
            if message.version >= 0:
                self._take(message, framed.payload)

        dense = range(len(self._slices))  # rows of tables are pulled by the forward pass
        self._ask(partial(_fetch, version, not self.exchange.maps), fetched, dense, self._meanwhile(version - 1, told))
        first = told[0]
        rows = np.frombuffer(first.rows).reshape(-1, ROW) if first.rows else None
        result = judge_rows(version - 1, rows) if rows is not None else None
        if any(one.version < 0 for one in told.values()):
            raise DistBeliefError(f"step {version - 1} cannot be applied")
        self._computer.commit_integers(first.integers or None)
        self._applied = version
        self._reached[0] = max(int(self._reached[0]), version)
        if result and rows is not None:
            self._remember(version - 1, rows, CLOCK.now(), self._seat.generation)
        return result

    def _remember(self, step: int, rows: np.ndarray, at: float, generation: int) -> None:
        if not self._past or self._past[-1].step < step:
            given = judge_rows(step, rows)
            self._past.append(Applied(step, given.loss, given.samples, given.fingerprint, generation, at))

    def _look_ahead(self, step: int) -> None:
        """Load the first batch of the next step while servers and other members finish this one."""
        if step < self._seat.steps:
            work = self._work(self._schedule.occupied(step)).partials.work
            if work:
                self._ahead = (step, self._fetch(step, work[0].shard, work[0].shard + 1))

    def copy_portion(self, applied: int, into: Segment) -> AlreadyCopied:
        """The servers' state cannot change before this member goes on."""
        return self._read_portion(into, applied, self.exchange.abort)


def _beside_gradients(result: ShardResult, samples: int) -> bytes:
    """What a recheck compares, besides the dense gradients."""
    row = np.array((result.loss_sum, result.weight, result.integers, samples))
    of_tables = [one.rows.tobytes() + one.gradients.tobytes() for one in result.rows]
    return b"".join([row.tobytes(), result.touched.tobytes(), *of_tables])


def _about(make: Callable[[int, int], Question], number: int, ticket: int) -> Question:
    return make(ticket, number)


def _fetch(version: int, inline: bool, ticket: int, number: int) -> Question:
    return PullValues(ticket, number, version, inline)


def measure_step(step: int, generation: int, members: int, ticket: int, number: int) -> Question:
    return MeasureStep(ticket, number, step, generation, members)
