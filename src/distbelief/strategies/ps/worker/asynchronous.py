"""`ps:async` and `ps:ssp` on a worker: it leases an update, computes it with its own copy of the parameters, and pushes
it.

No worker waits for another one. Leases (rules/leases.py) lie in a slice of their own beside the parameters. An update
is named by its number, so it is applied once, whichever workers compute it and however often they send it.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from distbelief.control.messages import RUN_ENDS
from distbelief.errors import NonFiniteLoss
from distbelief.shards import Schedule, mix, shard_seed
from distbelief.steadyclock import CLOCK
from distbelief.strategies.base import Applied, Seat, Takeover, Task
from distbelief.strategies.base import Fetch as FetchBatch
from distbelief.strategies.flatmodel.compute import ShardComputer
from distbelief.strategies.flatmodel.tileoptimizer import Recipe, norms
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import (
    AtGate,
    CompleteUpdate,
    Gradient,
    Inspect,
    Inspected,
    LeasedUpdate,
    LeaseResult,
    Members,
    NoLease,
    Note,
    OpenGate,
    PulledValues,
    PullValues,
    Question,
    RequestLease,
    SetGate,
)
from distbelief.strategies.ps.rules.options import ParameterServerOptions
from distbelief.strategies.ps.rules.pace import TimeSpent
from distbelief.strategies.ps.tables.remote import ANY, RemoteTables
from distbelief.strategies.ps.worker.exchange import ServerExchange
from distbelief.strategies.ps.worker.member import AlreadyCopied, ParameterServerMember
from distbelief.strategies.tables.rowgradients import RowGradients, added_rows
from distbelief.transport.abort import Abort
from distbelief.transport.device.exchange import stretches
from distbelief.transport.shm.segment import Memory, Segment


def free_slots(strategy: ParameterServerOptions) -> int:
    """The number of slots (memory for gradients) of a worker. Batches that are pushed together need two; delay
    compensation keeps the values in the last one."""
    return (2 if strategy.adaptive else min(strategy.n_push, 2)) + (strategy.dc > 0)


class AbortAtBoundaries:
    """The abort of a generation, for a worker that finishes its update before a change of members: only the end of the
    run interrupts it."""

    def __init__(self, abort: Abort) -> None:
        self._abort = abort

    def check(self) -> None:
        if self._abort.reason == RUN_ENDS:
            self._abort.check()


class AsynchronousReplica(ParameterServerMember):
    """See `Seated`. `next` and `work` take the place of steps that members do together."""

    def __init__(
        self, computer: ShardComputer, recipe: Recipe, schedule: Schedule, seat: Seat, exchange: ServerExchange,
        fetch: FetchBatch, tables: RemoteTables, strategy: ParameterServerOptions,
    ) -> None:  # fmt: skip
        super().__init__(computer, recipe, schedule, seat, exchange, fetch, tables)
        self.staleness: Mapping[int, int] = {}
        self.spent = TimeSpent()
        self._strategy = strategy
        self._pace = np.frombuffer(exchange.memory("pace", 16).buffer, np.int64, 2)
        """n_push and n_fetch; kept from one generation to the next."""
        if not self._pace.all():
            self._pace[:] = (strategy.n_push, strategy.n_fetch)
        last = computer.layout.parameter_tiles
        self._grain = stretches(computer.layout.tiles, last, exchange.grain_bytes)
        self._parameter_parts = sum(1 for some in self._grain if some.tiles.stop <= last)
        self._abort = AbortAtBoundaries(exchange.abort)
        self._leases = len(self._slices) + len(tables.slices)
        tables.bind(self._client, self._abort, lambda: ANY)
        self._version = -1
        self._since_fetch = 0
        self._join()

    def _join(self) -> None:
        exchange = self.exchange
        self._client.restart()
        self._check_slices(besides=1)
        looked: list[Inspected] = []
        self._client.ask([partial(_look, self._leases)], exchange.abort, lambda framed: looked.append(framed.message))
        self._applied, self._began = looked[0].version, looked[0].began
        self._note = looked[0].note
        self._known = 0  # the slice of leases remembers completions that may not have been reported
        if exchange.rank == 0:
            self._client.change(self._leases, Members(self._seat.generation, list(self._seat.workers)), exchange.abort)
        self._note_rollback()

    @property
    def adaptive(self) -> bool:
        return self._strategy.adaptive

    @property
    def pace(self) -> tuple[int, int]:
        """(n_push, n_fetch): batches that are pushed together, and updates from one pull to the next."""
        return int(self._pace[0]), int(self._pace[1])

    @pace.setter
    def pace(self, numbers: tuple[int, int]) -> None:
        self._pace[:] = numbers

    # --- updates -----------------------------------------------------------------------------------------------------

    def next(self) -> LeasedUpdate | NoLease | AtGate:
        """Request a lease: the update to compute, a reason to wait, or a gate."""
        started = time.perf_counter()
        n_push, n_fetch = self.pace
        fresh = self._since_fetch == 0 or self._since_fetch >= n_fetch
        version, wanted = -1 if fresh else self._version, n_push if self.adaptive else 0
        ask = RequestLease(self._seat.worker, version, self._known, wanted)
        given = self._client.change(self._leases, ask, self._abort)
        assert isinstance(given, LeaseResult)
        self._hear(given)
        what = given.what
        assert isinstance(what, LeasedUpdate | NoLease | AtGate)
        if isinstance(what, LeasedUpdate):
            self.spent.push_s += time.perf_counter() - started
        if isinstance(what, LeasedUpdate) and fresh:
            before = time.perf_counter()
            self.fetch()
            self.spent.fetch_s += time.perf_counter() - before
            self._version = what.completed
            self._since_fetch = 0
        elif isinstance(what, NoLease) and what.fetch:
            self._since_fetch = 0
        self.comm_s += time.perf_counter() - started
        return what

    def _hear(self, given: LeaseResult) -> None:
        for one in given.news:
            told = hashlib.blake2b(f"{one.step} {one.loss!r} {one.samples}".encode(), digest_size=8).hexdigest()
            self._past.append(Applied(one.step, one.loss, one.samples, told, self._seat.generation, one.at))
        if given.news:
            self._known = given.news[-1].step + 1
        self.staleness = given.staleness or self.staleness
        self._applied = self._reached[0] = given.done

    def fetch(self) -> None:
        """Pull the present values."""

        def fetched(framed: Framed) -> None:
            message: PulledValues = framed.message
            self._take(message, framed.payload)
            if message.slice == 0:
                self._base_integers = np.frombuffer(message.integers, np.int64)
                self._computer.commit_integers(self._as_buffers(self._base_integers))

        inline = not self.exchange.maps
        questions = [partial(_fetch, shape.number, inline) for shape in self._slices]
        self._client.ask(questions, self._abort, fetched)
        if self._strategy.dc and self.exchange.slot(0)[1]:
            then, _ = self.exchange.slot(free_slots(self._strategy) - 1)
            size_bytes = self._computer.layout.size_bytes
            then.tensor(torch.uint8, 0, size_bytes).copy_(self._values.tensor(torch.uint8, 0, size_bytes))

    def work(self, lease: LeasedUpdate) -> None:
        """Compute the batches of an update, push it, and complete it when every slice has it."""
        room = self.exchange.room(0)
        other = self.exchange.room(1) if lease.batches > 1 else room
        touched = np.zeros(len(self._computer.layout.entries), np.uint8)
        losses, counts, weight = [], [], 0.0
        rows: list[Sequence[RowGradients]] = []
        for number in range(lease.batches):
            step = lease.step + number
            into = room if number == 0 else other
            self.exchange.working_on(step, 0)
            batch, samples = self._fetch(step, 0, self._schedule.shards)
            seed = shard_seed(self._job.seed, step, 0)
            began, before_s = time.perf_counter(), self._tables.comm_s
            result = self._computer.run(batch, samples, seed, into, self._buffers, lambda tile: None)
            waited_s = self._tables.comm_s - before_s
            self.spent.compute_s += time.perf_counter() - began - waited_s
            self.comm_s += waited_s
            self.exchange.working(-1)
            if not math.isfinite(result.loss_sum):
                raise NonFiniteLoss(result.loss_sum / (result.weight or 1.0), step, 0)
            self._into_deltas(into)
            if number:
                for mine, more in zip(self._parts(room), self._parts(other), strict=True):
                    mine.add_(more)
            touched |= result.touched
            rows.append(result.rows)
            losses.append(result.loss_sum / result.weight if result.weight else 0.0)
            counts.append(samples)
            weight += result.weight
        sums = [added_rows(of_table) for of_table in zip(*rows, strict=True)]
        began = time.perf_counter()
        self._prepare(room, sums, weight, lease)
        self.exchange.bring(0)  # a device has done its work when this returns
        started = time.perf_counter()
        self.spent.compute_s += started - began
        slot, name = self.exchange.slot(0)
        self._tables.push_update(lease.update, lease.step, sums)
        self._push(lease, slot, name, touched)
        done = CompleteUpdate(lease.update, lease.token, self._seat.worker, losses, counts, CLOCK.now())
        self._client.push(self._leases, done)
        self._since_fetch += 1
        self.comm_s += time.perf_counter() - started
        self.spent.push_s += time.perf_counter() - started
        self.spent.updates += 1

    def _into_deltas(self, room: Memory) -> None:
        """Replace the new values of the buffers by differences, which are pushed."""
        layout = self._computer.layout
        tiles = self._tiles(room)[layout.parameter_tiles :]
        for part, base in zip(tiles, self._buffers, strict=True):
            part.sub_(base)

    def _prepare(self, room: Memory, rows: Sequence[RowGradients], weight: float, lease: LeasedUpdate) -> None:
        """Turn sums into means, clip them, and add noise, as job and strategy want."""
        of_rows = [torch.from_numpy(one.gradients) for one in rows]
        parts = [*self._parts(room)[: self._parameter_parts], *of_rows]
        scale = 1.0 / weight if weight else 0.0
        for part in parts:
            part.mul_(scale)
        if self._job.clip_norm is not None:
            squares = [norm**2 for norm in (*norms(self._gradients(room)), *norms(of_rows))]
            factor = self._job.clip_factor(math.sqrt(math.fsum(squares)))
            for part in parts if factor < 1.0 else ():
                part.mul_(factor)
        if self._strategy.noise:
            generator = torch.Generator().manual_seed(mix(self._job.seed, 5, lease.update) >> 1)
            for tile in (*self._gradients(room), *of_rows):
                noise = torch.randn(tile.shape, generator=generator, dtype=torch.float32)
                tile.add_(noise.to(tile.device), alpha=self._strategy.noise)

    def _push(self, lease: LeasedUpdate, slot: Segment, name: str, touched: np.ndarray) -> None:
        marks = touched.tobytes()
        present = self._as_numbers()
        dated = self._strategy.dc > 0
        values = self.exchange.slot(free_slots(self._strategy) - 1)[1] if dated and name else ""
        for shape in self._slices:
            integers = (present - self._base_integers).tobytes() if shape.number == 0 else b""
            content = Gradient(lease.update, lease.step, marks, integers, name, dated, values)
            payload: Any = None if name else slot.view(shape.first_byte, shape.value_bytes)
            if dated and not name:
                then = self._values.tensor(torch.uint8, shape.first_byte, shape.value_bytes)
                payload = b"".join((payload, then.cpu().numpy().data))
            self._client.push(shape.number, content, payload)
        self._client.settle(self._abort)

    def _tiles(self, memory: Memory) -> list[torch.Tensor]:
        return [memory.tensor(t.dtype, t.offset_bytes, t.numel) for t in self._computer.layout.tiles]

    def _gradients(self, room: Memory) -> list[torch.Tensor]:
        return self._tiles(room)[: self._computer.layout.parameter_tiles]

    def _parts(self, room: Memory) -> list[torch.Tensor]:
        """The same memory, in the pieces that are processed one by one."""
        return [room.tensor(s.dtype, s.offset_bytes, s.numel) for s in self._grain]

    def _as_numbers(self) -> np.ndarray:
        found = [b.reshape(-1).to(torch.int64).cpu().numpy() for b in self._integer_buffers()]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _integer_buffers(self) -> list[torch.Tensor]:
        return [b for _, b in self._computer.model.named_buffers() if not b.is_floating_point()]

    def _as_buffers(self, numbers: np.ndarray) -> bytes | None:
        """The bytes of the integer buffers, as the model has them."""
        at, content = 0, b""
        for buffer in self._integer_buffers():
            part = torch.from_numpy(numbers[at : at + buffer.numel()].copy()).to(buffer.dtype)
            content += part.numpy().tobytes()
            at += buffer.numel()
        return content or None

    def finish(self) -> None:
        """Return when all pushes are acknowledged."""
        self._client.settle(self._abort)

    # --- gates -------------------------------------------------------------------------------------------------------

    def gate(self, step: int) -> None:
        """Halt all workers when exactly `step` steps are done."""
        self._client.change(self._leases, SetGate(step), self._abort)

    def open(self, step: int) -> None:
        self._client.change(self._leases, OpenGate(step), self._abort)

    def arrived(self, step: int) -> None:
        """All workers are at this gate: pull the parameters after exactly `step` steps."""
        self._applied = step
        self._reached[0] = step
        self.fetch()
        self._since_fetch = 0

    # --- results and notes -------------------------------------------------------------------------------------------

    def taken_over(self) -> Takeover | None:
        return None

    def keep_note(self, content: bytes) -> None:
        self._note = (self._applied, content)
        if self.exchange.rank == 0:
            self._client.change(self._leases, Note(self._applied, content), self._abort)

    def copy_portion(self, applied: int, into: Segment) -> AlreadyCopied:
        """All workers are at a gate, and none pushes."""
        return self._read_portion(into, applied, self._abort)

    def measure_alone(self, tasks: Sequence[Task], measure: Callable[[Task, Any, Any], None]) -> None:
        self._whole.measure(tasks, measure)


def _look(number: int, ticket: int) -> Question:
    return Inspect(ticket, number)


def _fetch(number: int, inline: bool, ticket: int) -> Question:
    return PullValues(ticket, number, 0, inline)
