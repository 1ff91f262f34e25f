"""A part of the sparse tables as a slice on a server, in `ps:sync` and in the asynchronous modes.

A part has rows of all tables. In `ps:sync` it keeps the row gradients of every shard until the step is applied, and
then adds them up in the order of the shards. So the bits do not depend on which workers have computed the shards, nor
on deaths. A shard counts once, however often it comes. The step is applied on `ApplyStep`, as in a slice of dense
parameters (server/syncslice.py). In the asynchronous modes an update of rows is applied as it comes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from distbelief.errors import DistBeliefError
from distbelief.job import Job
from distbelief.shards import Schedule
from distbelief.strategies.flatmodel.rules.stepwork import WEIGHT, judge_rows
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import (
    ApplyStep,
    Inspect,
    Inspected,
    MeasureStep,
    PushResult,
    Question,
    ReadState,
    SliceState,
    Snapshot,
    StepMeasured,
)
from distbelief.strategies.ps.server.stores import Change, State
from distbelief.strategies.ps.tables.messages import (
    CountedRows,
    CountRows,
    ListRows,
    PulledRows,
    PullRows,
    ShardRowGradients,
    UpdateRowGradients,
)
from distbelief.strategies.ps.tables.payloads import from_payload
from distbelief.strategies.ps.tables.rowbuckets import BUCKETS, buckets_of
from distbelief.strategies.ps.tables.specs import TablePartShape, TableSpec
from distbelief.strategies.ps.tables.store import Table
from distbelief.strategies.tables.rowgradients import RowGradients, added_up
from distbelief.transport.exchange import ROW

Arrays = dict[str, torch.Tensor]


class TableSlice:
    """The rows of this part, and what both kinds of parts have in common."""

    def __init__(self, specs: Sequence[TableSpec], job: Job) -> None:
        self.version = 0
        self._specs = specs
        self._job = job
        self._widths = [spec.form.width for spec in specs]
        self.tables = [Table(spec.form, spec.optimizer) for spec in specs]

    def begin(self, tables: Sequence[Arrays], version: int) -> None:
        """The first state of a life."""
        self.version = version
        for table, arrays in zip(self.tables, tables, strict=True):
            table.load(arrays)

    def _factor(self, step: int) -> float:
        return self._job.rate_factor(step)

    @property
    def counts(self) -> list[int]:
        return [table.resident for table in self.tables]

    def contents(self) -> torch.Tensor:
        """A copy of all rows with their optimizer state."""
        shape = TablePartShape(self._specs, self.counts)
        content = torch.zeros(shape.size_bytes, dtype=torch.uint8)
        for table, views in zip(self.tables, shape.views(content), strict=True):
            for key, values in table.state().items():
                views[key].copy_(values)
        return content

    def _load(self, counts: Sequence[int], content: torch.Tensor) -> int:
        """Returns the offset at which the bytes of the tables end."""
        shape = TablePartShape(self._specs, counts)
        for table, arrays in zip(self.tables, shape.views(content), strict=True):
            table.load(arrays)
        return shape.size_bytes

    def with_bytes(self, change: Change) -> Change:
        return change  # row gradients are always payloads

    def given(self, client: int) -> PushResult | None:
        return None

    def _values(self, question: PullRows) -> Framed:
        rows = torch.from_numpy(np.frombuffer(question.rows, np.int64).copy())
        values = self.tables[question.table].pull(rows).numpy()
        return Framed(PulledRows(question.ticket, question.slice, self.version), values.reshape(-1).view(np.uint8))

    def _numbers(self, question: ListRows) -> Framed:
        rows = self.tables[question.table].numbers()
        return Framed(PulledRows(question.ticket, question.slice, self.version), rows.view(np.uint8))

    def _counted(self, question: CountRows) -> Framed:
        return Framed(CountedRows(question.ticket, question.slice, self.version, self.counts))

    def _read(self, question: ReadState) -> Framed:
        header = SliceState(question.ticket, question.slice, self.version, self.counts)
        return Framed(header, self.contents().numpy())


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A view if possible. A payload may be read-only or not aligned, and is copied then."""
    return torch.from_numpy(np.require(array, requirements=["C", "A", "W"]))


class AsynchronousTableSlice(TableSlice):
    def apply(self, change: Change) -> None:
        match change.content:
            case UpdateRowGradients(step=step, counts=counts):
                (found,) = from_payload([[count] for count in counts], self._widths, change.payload)
                for table, one in zip(self.tables, found, strict=True):
                    table.push(as_tensor(one.rows), as_tensor(one.gradients), self._factor(step))
                self.version += 1

    def state(self) -> State:
        return Snapshot(self.version, msgspec.msgpack.encode(self.counts)), self.contents()

    def load(self, state: State) -> None:
        snapshot, content = state
        self._load(msgspec.msgpack.decode(snapshot.about, type=list[int]), content)
        self.version = snapshot.version

    def reply(self, question: Question, segment: str, everywhere: bool, caught_up: bool) -> Framed | None:
        match question:
            case PullRows():
                return self._values(question)
            case CountRows():
                return self._counted(question) if caught_up else None
            case ListRows():
                return self._numbers(question) if caught_up else None
            case ReadState():
                return self._read(question) if caught_up else None
            case _:
                raise DistBeliefError(f"a part of asynchronous tables does not answer {type(question).__name__}")


class _Step(msgspec.Struct, frozen=True):
    """For copies: the part's row gradients of the step under way."""

    counts: list[int]
    told: bytes
    shards: dict[int, list[int]]
    """Shard -> the number of rows of each table."""
    go: float | None
    measured: tuple[int, list[float]]


class SynchronousTableSlice(TableSlice):
    def __init__(self, specs: Sequence[TableSpec], job: Job, schedule: Schedule) -> None:
        super().__init__(specs, job)
        self._schedule = schedule
        self._measured: tuple[int, list[float]] = (-1, [])
        """The last step whose shards were all there, and with clipping the squares of its gradients."""
        self._start()

    def begin(self, tables: Sequence[Arrays], version: int) -> None:
        super().begin(tables, version)
        self._start()

    def _start(self) -> None:
        """Begin the next step, without any row gradients."""
        self._shards: dict[int, list[RowGradients]] = {}
        self._told = np.zeros((self._schedule.shards, ROW))
        self._sums: list[RowGradients] = []
        self._go: float | None = None
        self._unsound = False

    # --- as a store --------------------------------------------------------------------------------------------------

    def apply(self, change: Change) -> None:
        match change.content:
            case ShardRowGradients() if change.content.step == self.version:
                self._add(change.content, from_payload(change.content.counts, self._widths, change.payload))
            case ApplyStep(step=step, factor=factor) if step == self.version and self._go is None:
                self._go = factor
                self._proceed()

    def _add(self, message: ShardRowGradients, found: list[list[RowGradients]]) -> None:
        told = np.frombuffer(message.told).reshape(-1, ROW)
        for place, shard in enumerate(message.shards):
            if not 0 <= shard < self._schedule.shards:
                raise DistBeliefError(f"there is no shard {shard} in a step")
            if shard not in self._shards:
                self._shards[shard] = found[place]
                self._told[shard] = told[place]
        self._proceed()

    def _proceed(self) -> None:
        """Apply the step, if all shards and `ApplyStep` came."""
        if self._unsound or any(shard not in self._shards for shard in range(self._schedule.occupied(self.version))):
            return
        try:
            judge_rows(self.version, self._told)
        except DistBeliefError:
            self._unsound = True  # the dense slices tell the workers why
            return
        weight = math.fsum(self._told[:, WEIGHT])
        if self._measured[0] < self.version:
            self._reduce(1.0 / weight if weight else 0.0)
        if self._go is None:
            return
        for table, one in zip(self.tables, self._sums, strict=True):
            if weight:
                if self._go < 1.0:
                    np.multiply(one.gradients, np.float32(self._go), out=one.gradients)
                table.push(as_tensor(one.rows), as_tensor(one.gradients), self._factor(self.version))
        self.version += 1
        self._start()

    def _reduce(self, scale: float) -> None:
        squares: list[float] = []
        for table in range(len(self.tables)):
            shards = [self._shards[shard][table] for shard in sorted(self._shards)]
            rows, total = added_up(
                np.concatenate([one.rows for one in shards]), np.concatenate([one.gradients for one in shards])
            )
            total *= np.float32(scale)
            if self._job.clip_norm is not None:
                squares += _squares(rows, total)
            self._sums.append(RowGradients(rows, total))
        self._measured = (self.version, squares)

    def state(self) -> State:
        shards = {shard: [len(one.rows) for one in found] for shard, found in self._shards.items()}
        about = _Step(self.counts, self._told.tobytes(), shards, self._go, self._measured)
        parts = [self.contents().numpy()]
        for found in self._shards.values():
            parts += [one.rows.view(np.uint8) for one in found]
            parts += [one.gradients.reshape(-1).view(np.uint8) for one in found]
        return Snapshot(self.version, msgspec.msgpack.encode(about)), torch.from_numpy(np.concatenate(parts))

    def load(self, state: State) -> None:
        snapshot, content = state
        about = msgspec.msgpack.decode(snapshot.about, type=_Step)
        at = self._load(about.counts, content)
        self.version = snapshot.version
        self._start()
        self._told[:] = np.frombuffer(about.told).reshape(self._told.shape)
        raw = content.numpy()
        for shard, counts in about.shards.items():
            size = sum(count * (8 + 4 * width) for count, width in zip(counts, self._widths, strict=True))
            (self._shards[shard],) = from_payload(
                [[count] for count in counts], self._widths, raw[at : at + size].copy()
            )
            at += size
        self._go = about.go
        # A copy does not have the sums: they are added up again, the same way.
        self._measured = about.measured if about.measured[0] < snapshot.version else (-1, [])
        self._proceed()

    # --- questions ----------------------------------------------------------------------------------------------------

    def reply(self, question: Question, segment: str, everywhere: bool, caught_up: bool) -> Framed | None:
        match question:
            case Inspect():
                if not caught_up:
                    return None  # members do not compute again what this reply shows, so no death may undo it
                nodes = [(shard, shard + 1) for shard in sorted(self._shards)]
                return Framed(Inspected(question.ticket, question.slice, self.version, nodes))
            case MeasureStep(step=step):
                measured, squares = self._measured
                if not caught_up or (measured < step and not self._unsound):
                    return None  # members continue from this reply, so no death may undo it
                return Framed(StepMeasured(question.ticket, question.slice, squares))
            case CountRows(version=-1):
                return self._counted(question)
            case PullRows() | ListRows() | CountRows() | ReadState():
                if self.version < question.version:
                    return None
                return self._at_version(question) if self.version == question.version else _gone_on(question)
            case _:
                raise DistBeliefError(f"a part of the tables does not answer {type(question).__name__}")

    def _at_version(self, question: PullRows | ListRows | CountRows | ReadState) -> Framed:
        match question:
            case PullRows():
                return self._values(question)
            case ListRows():
                return self._numbers(question)
            case CountRows():
                return self._counted(question)
            case ReadState():
                return self._read(question)


def _squares(rows: NDArray[np.int64], gradients: NDArray[np.float32]) -> list[float]:
    """The sums of squares of the gradients by bucket: the same numbers for any number of parts."""
    of_rows = np.square(gradients, dtype=np.float64).sum(axis=1)
    found: list[float] = np.bincount(buckets_of(rows), of_rows, BUCKETS).tolist()
    return [one for one in found if one]


def _gone_on(question: PullRows | ListRows | CountRows | ReadState) -> Framed:
    """The reply when the part has a later version already."""
    match question:
        case PullRows() | ListRows():
            return Framed(PulledRows(question.ticket, question.slice, -1))
        case CountRows():
            return Framed(CountedRows(question.ticket, question.slice, -1, []))
        case ReadState():
            return Framed(SliceState(question.ticket, question.slice, -1))
