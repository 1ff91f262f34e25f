"""ps:async and ps:ssp on a worker: it leases batches, computes them with parameters of its own, and pushes the result.

Nobody waits for anybody. Which batch is whose is the ledger's (servers/leases.py), which lies beside the parameters;
an update is named by its number, so it counts once, whoever computes it and however often it is sent.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distbelief.comm.segment import Segment
from distbelief.comm.served import ServedGroup
from distbelief.comm.serverwords import (
    Ask,
    Complete,
    Fetch,
    Fetched,
    Gate,
    Gathered,
    Given,
    Gradient,
    Lease,
    Letter,
    Look,
    Looked,
    Members,
    Note,
    Open,
    Question,
    Wait,
)
from distbelief.comm.words import Abort
from distbelief.errors import DistBeliefError
from distbelief.shards import Schedule, mix, shard_seed
from distbelief.strategies.base import Applied, NonFiniteLoss, RolledBack, Seat, Takeover, Task
from distbelief.strategies.base import Fetch as FetchBatch
from distbelief.strategies.committed import CommittedModel
from distbelief.strategies.compute import ShardComputer
from distbelief.strategies.named import TilePortion, outside_of_tiles, whole_entries
from distbelief.strategies.parameterserver import ParameterServer
from distbelief.strategies.reading import AlreadyCopied, read_portion
from distbelief.strategies.slicing import SliceShape, cut
from distbelief.strategies.tileoptimizer import Recipe

RUN_ENDS = "the run ends"


class AtBoundaries:
    """The abort of a generation, for a worker whose update must not be lost to a change of members: only the end of the
    run interrupts it; everything else waits until the update is done."""

    def __init__(self, abort: Abort) -> None:
        self._abort = abort

    def check(self) -> None:
        if self._abort.reason == RUN_ENDS:
            self._abort.check()


class AsynchronousReplica:
    """See `Replica`, without steps in common: `next` and `work` take their place."""

    def __init__(
        self, computer: ShardComputer, recipe: Recipe, schedule: Schedule, seat: Seat, exchange: ServedGroup,
        fetch: FetchBatch, strategy: ParameterServer,
    ) -> None:  # fmt: skip
        self.exchange = exchange
        self.comm_s = 0.0
        self.staleness: Mapping[int, int] = {}
        self._computer = computer
        self._job = computer.job
        self._recipe = recipe
        self._schedule = schedule
        self._seat = seat
        self._fetch = fetch
        self._strategy = strategy
        self._client = exchange.client
        self._abort = AtBoundaries(exchange.abort)
        self._slices = cut(computer.layout, recipe)
        self._ledger = len(self._slices)
        self._values = exchange.memory("values", computer.layout.size_bytes)
        self._segments: dict[str, torch.Tensor] = {}
        computer.bind_parameters(self._values, 0)
        self._buffers = computer.committed_buffers(self._values, 0)
        self._whole = CommittedModel(computer, self._buffers)
        self._past: deque[Applied] = deque(maxlen=1024)
        self._version = -1
        self._since_fetch = 0
        self._join()

    def _join(self) -> None:
        exchange = self.exchange
        self._client.restart()
        there = self._client.slices(exchange.abort)
        if there != len(self._slices) + 1:
            raise DistBeliefError(f"the servers have {there - 1} slices, this worker {len(self._slices)}")
        looked: list[Looked] = []
        self._client.ask([partial(_look, self._ledger)], exchange.abort, lambda letter: looked.append(letter.message))
        self._completed: int = looked[0].version
        self._note = looked[0].note
        reached = np.frombuffer(exchange.memory("reached", 8).buffer, np.int64, 1)
        self._reached = reached
        self._known = 0  # the ledger remembers what may not have been reported
        if exchange.rank == 0:
            self._client.change(self._ledger, Members(self._seat.generation, list(self._seat.workers)), exchange.abort)
        self._rolled_back: RolledBack | None = None
        if self._completed < reached[0]:  # not before: a generation that is given up here tells nobody of it
            self._rolled_back = RolledBack(int(reached[0]), self._completed, "checkpoint")
        self._reached[0] = self._completed

    # --- updates -----------------------------------------------------------------------------------------------------

    def next(self) -> Lease | Wait | Gathered:
        """What to do next."""
        started = time.perf_counter()
        fresh = self._since_fetch == 0 or self._since_fetch >= self._strategy.n_fetch
        ask = Ask(self._seat.worker, time.time(), -1 if fresh else self._version, self._known)
        given = self._client.change(self._ledger, ask, self._abort)
        assert isinstance(given, Given)
        self._hear(given)
        what = given.what
        if isinstance(what, Lease) and fresh:
            self.fetch()
            self._version = what.completed
            self._since_fetch = 0
        elif isinstance(what, Wait) and what.fetch:
            self._since_fetch = 0
        self.comm_s += time.perf_counter() - started
        return what

    def _hear(self, given: Given) -> None:
        for one in given.news:
            told = hashlib.blake2b(f"{one.step} {one.loss!r} {one.samples}".encode(), digest_size=8).hexdigest()
            self._past.append(Applied(one.step, one.loss, one.samples, told, self._seat.generation, one.at))
        if given.news:
            self._known = given.news[-1].step + 1
        self.staleness = given.staleness or self.staleness
        self._completed = self._reached[0] = given.done

    def fetch(self) -> None:
        """Bring the values to what the servers have now."""

        def fetched(letter: Letter) -> None:
            message: Fetched = letter.message
            self._take(self._slices[message.slice], message, letter.payload)
            if message.slice == 0:
                self._base_integers = np.frombuffer(message.integers, np.int64)
                self._computer.commit_integers(self._as_buffers(self._base_integers))

        inline = not self.exchange.maps
        questions = [partial(_fetch, shape.number, inline) for shape in self._slices]
        self._client.ask(questions, self._abort, fetched)

    def _take(self, shape: SliceShape, message: Fetched, payload: Any) -> None:
        into = self._values.tensor(torch.uint8, shape.first_byte, shape.value_bytes)
        if not message.segment:
            into.copy_(torch.frombuffer(payload, dtype=torch.uint8))
            return
        if message.segment not in self._segments:
            self._segments[message.segment] = self.exchange.values(message.segment, shape.value_bytes)
        into.copy_(self._segments[message.segment])

    def work(self, lease: Lease) -> None:
        """Compute the batches of an update, push it, and say so when every slice has it."""
        slot, name = self.exchange.slot(0)
        other, _ = self.exchange.slot(1) if lease.batches > 1 else (slot, "")
        touched = np.zeros(len(self._computer.layout.entries), np.uint8)
        losses, counts, weight = [], [], 0.0
        for number in range(lease.batches):
            step = lease.step + number
            into = slot if number == 0 else other
            self.exchange.working_on(step, 0)
            batch, samples = self._fetch(step, 0, self._schedule.shards)
            seed = shard_seed(self._job.seed, step, 0)
            result = self._computer.run(batch, samples, seed, into, self._buffers, lambda tile: None)
            self.exchange.working(-1)
            if not math.isfinite(result.loss_sum):
                raise NonFiniteLoss(result.loss_sum / (result.weight or 1.0), step, 0)
            self._into_deltas(into)
            if number:
                for mine, more in zip(self._tiles(slot), self._tiles(other), strict=True):
                    mine.add_(more)
            touched |= result.touched
            losses.append(result.loss_sum / result.weight if result.weight else 0.0)
            counts.append(samples)
            weight += result.weight
        self._prepare(slot, weight, lease)
        started = time.perf_counter()
        self._push(lease, slot, name, touched)
        done = Complete(lease.update, lease.token, self._seat.worker, losses, counts, time.time())
        self._client.push(self._ledger, done)
        self._since_fetch += 1
        self.comm_s += time.perf_counter() - started

    def _into_deltas(self, slot: Segment) -> None:
        """A shard leaves the buffers' new values in the slot; what is pushed is by how much they change."""
        layout = self._computer.layout
        tiles = self._tiles(slot)[layout.parameter_tiles :]
        for part, base in zip(tiles, self._buffers, strict=True):
            part.sub_(base)

    def _prepare(self, slot: Segment, weight: float, lease: Lease) -> None:
        """Sums become means; what the strategy and the job want of a gradient is done to it."""
        parts = self._tiles(slot)[: self._computer.layout.parameter_tiles]
        scale = 1.0 / weight if weight else 0.0
        for part in parts:
            part.mul_(scale)
        if self._job.clip_norm is not None:
            squares = [float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in parts]
            factor = min(1.0, self._job.clip_norm / (math.sqrt(math.fsum(squares)) + 1e-6))
            for part in parts if factor < 1.0 else ():
                part.mul_(factor)
        if self._strategy.noise:
            generator = torch.Generator().manual_seed(mix(self._job.seed, 5, lease.update) >> 1)
            for part in parts:
                part.add_(torch.randn(part.shape, generator=generator, dtype=torch.float32), alpha=self._strategy.noise)

    def _push(self, lease: Lease, slot: Segment, name: str, touched: np.ndarray) -> None:
        marks = touched.tobytes()
        present = self._as_numbers()
        for shape in self._slices:
            integers = (present - self._base_integers).tobytes() if shape.number == 0 else b""
            content = Gradient(lease.update, lease.step, marks, integers, name)
            payload = None if name else slot.view(shape.first_byte, shape.value_bytes)
            self._client.push(shape.number, content, payload)
        self._client.settle(self._abort)

    def _tiles(self, slot: Segment) -> list[torch.Tensor]:
        return [slot.tensor(t.dtype, t.offset_bytes, t.numel) for t in self._computer.layout.tiles]

    def _as_numbers(self) -> np.ndarray:
        found = [b.reshape(-1).to(torch.int64).numpy() for b in self._integer_buffers()]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _integer_buffers(self) -> list[torch.Tensor]:
        return [b for _, b in self._computer.model.named_buffers() if not b.is_floating_point()]

    def _as_buffers(self, numbers: np.ndarray) -> bytes | None:
        """The integer buffers' bytes, as the model has them."""
        at, content = 0, b""
        for buffer in self._integer_buffers():
            part = torch.from_numpy(numbers[at : at + buffer.numel()].copy()).to(buffer.dtype)
            content += part.numpy().tobytes()
            at += buffer.numel()
        return content or None

    def finish(self) -> None:
        """Return when all that was pushed counts."""
        self._client.settle(self._abort)

    # --- gates -------------------------------------------------------------------------------------------------------

    def gate(self, step: int) -> None:
        """Have all come to a halt when exactly so many steps are done."""
        self._client.change(self._ledger, Gate(step), self._abort)

    def open(self, step: int) -> None:
        self._client.change(self._ledger, Open(step), self._abort)

    def arrived(self, step: int) -> None:
        """All are at this gate: these are the parameters after exactly so many steps."""
        self._completed = step
        self._reached[0] = step
        self.fetch()
        self._since_fetch = 0

    # --- what is known -----------------------------------------------------------------------------------------------

    def steps_applied(self) -> int:
        return self._completed

    def taken_over(self) -> Takeover | None:
        return None

    def remembered(self, first: int) -> list[Applied]:
        return [one for one in list(self._past) if one.step >= first]

    def note(self) -> tuple[int, bytes]:
        return self._note

    def keep_note(self, content: bytes) -> None:
        self._note = (self._completed, content)
        if self.exchange.rank == 0:
            self._client.change(self._ledger, Note(self._completed, content), self._abort)

    def rolled_back(self) -> RolledBack | None:
        return self._rolled_back

    def waits(self) -> Mapping[int, float]:
        return {}

    def traffic(self) -> tuple[int, int]:
        return 0, 0

    def plan_lines(self) -> Sequence[str]:
        return ()

    # --- the state ---------------------------------------------------------------------------------------------------

    @cached_property
    def _portions(self) -> list[TilePortion]:
        size, outside = self.exchange.size, whole_entries(self._outside())
        return [
            TilePortion(
                self._computer.layout, self._recipe,
                [tile for shape in self._slices[rank::size] for tile in shape.tiles], outside if rank == 0 else [],
            )
            for rank in range(size)
        ]  # fmt: skip

    def _outside(self) -> dict[str, torch.Tensor]:
        return outside_of_tiles(self._computer.model, self._computer.layout, self._computer.integer_bytes())

    def portions(self) -> Sequence[TilePortion]:
        return self._portions

    def copy_portion(self, applied: int, into: Segment) -> AlreadyCopied:
        rank = self.exchange.rank
        self._whole.restore()
        return read_portion(
            self._client, self._abort, self._slices[rank :: self.exchange.size], self._portions[rank], into,
            self._outside() if rank == 0 else {}, version=None,
        )  # fmt: skip

    def measure(self, tasks: Sequence[Task], measure: Callable[[Task, Any, Any], None]) -> None:
        rank, size = self.exchange.rank, self.exchange.size
        self._whole.measure(tasks[rank * len(tasks) // size : (rank + 1) * len(tasks) // size], measure)

    def measure_alone(self, tasks: Sequence[Task], measure: Callable[[Task, Any, Any], None]) -> None:
        self._whole.measure(tasks, measure)

    def save_weights(self, path: Path) -> None:
        if self.exchange.rank == 0:
            self._whole.save(path)

    def weights_sha256(self) -> str:
        return self._whole.sha256()


def _look(number: int, ticket: int) -> Question:
    return Look(ticket, number)


def _fetch(number: int, inline: bool, ticket: int) -> Question:
    return Fetch(ticket, number, 0, inline)
