"""A part of the tables under `ps:sync`: what all shards say about rows is kept until the step is applied.

Then it is added up in the order of the shards; so the bits do not depend on who has computed what, nor on who has died.
A shard counts once, however often it comes. A step is applied on `Go`, as one of dense parameters is (see runslice.py).
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
from distbelief.strategies.flatmodel.verdict import WEIGHT, judge_rows
from distbelief.strategies.ps.protocol.frames import Letter
from distbelief.strategies.ps.protocol.messages import Contents, Go, Look, Looked, Measure, Measured, Question, Read
from distbelief.strategies.ps.server.stores import Change, Snapshot, State
from distbelief.strategies.ps.tables.embedding import RowGradients
from distbelief.strategies.ps.tables.messages import Count, Counted, Numbers, Pull, Pulled, ShardRows
from distbelief.strategies.ps.tables.rowbuckets import BUCKETS, buckets_of
from distbelief.strategies.ps.tables.rowmessages import together
from distbelief.strategies.ps.tables.rowsums import added_up
from distbelief.strategies.ps.tables.tablepart import Arrays, TablePart, as_tensor
from distbelief.strategies.ps.tables.tablespecs import TableSpec
from distbelief.transport.exchange import ROW


class _Step(msgspec.Struct, frozen=True):
    """What there is of the step under way."""

    counts: list[int]
    told: bytes
    shards: dict[int, list[int]]
    """Shard -> how many rows of each table."""
    go: float | None
    measured: tuple[int, list[float]]


class StepTables(TablePart):
    def __init__(self, specs: Sequence[TableSpec], job: Job, schedule: Schedule) -> None:
        super().__init__(specs, job)
        self._schedule = schedule
        self._measured: tuple[int, list[float]] = (-1, [])
        """The last step whose shards were all there, and the squares of its gradients, if they are limited."""
        self._start()

    def begin(self, tables: Sequence[Arrays], version: int) -> None:
        super().begin(tables, version)
        self._start()

    def _start(self) -> None:
        """Nothing is there of the next step."""
        self._shards: dict[int, list[RowGradients]] = {}
        self._told = np.zeros((self._schedule.shards, ROW))
        self._sums: list[RowGradients] = []
        self._go: float | None = None
        self._unsound = False

    # --- as a store --------------------------------------------------------------------------------------------------

    def apply(self, change: Change) -> None:
        match change.content:
            case ShardRows() if change.content.step == self.version:
                self._add(change.content, together(change.content.counts, self._widths, change.payload))
            case Go(step=step, factor=factor) if step == self.version and self._go is None:
                self._go = factor
                self._proceed()

    def _add(self, message: ShardRows, found: list[list[RowGradients]]) -> None:
        told = np.frombuffer(message.told).reshape(-1, ROW)
        for place, shard in enumerate(message.shards):
            if not 0 <= shard < self._schedule.shards:
                raise DistBeliefError(f"there is no shard {shard} in a step")
            if shard not in self._shards:
                self._shards[shard] = found[place]
                self._told[shard] = told[place]
        self._proceed()

    def _proceed(self) -> None:
        """Apply the step, if everything is there."""
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
            (self._shards[shard],) = together([[count] for count in counts], self._widths, raw[at : at + size].copy())
            at += size
        self._go = about.go
        # The sums do not travel: they are added up again, the same way.
        self._measured = about.measured if about.measured[0] < snapshot.version else (-1, [])
        self._proceed()

    # --- what is asked of it -----------------------------------------------------------------------------------------

    def reply(self, question: Question, segment: str, everywhere: bool, caught_up: bool) -> Letter | None:
        match question:
            case Look():
                if not caught_up:
                    return None  # nobody computes again what was seen here
                nodes = [(shard, shard + 1) for shard in sorted(self._shards)]
                return Letter(Looked(question.ticket, question.slice, self.version, nodes))
            case Measure(step=step):
                measured, squares = self._measured
                if not caught_up or (measured < step and not self._unsound):
                    return None  # what follows from the answer must not be undone by a death
                return Letter(Measured(question.ticket, question.slice, squares))
            case Count(version=-1):
                return self._counted(question)
            case Pull() | Numbers() | Count() | Read():
                if self.version < question.version:
                    return None
                return self._at_version(question) if self.version == question.version else _gone_on(question)
            case _:
                raise DistBeliefError(f"a part of the tables is not asked {type(question).__name__}")

    def _at_version(self, question: Pull | Numbers | Count | Read) -> Letter:
        match question:
            case Pull():
                return self._values(question)
            case Numbers():
                return self._numbers(question)
            case Count():
                return self._counted(question)
            case Read():
                return self._read(question)


def _squares(rows: NDArray[np.int64], gradients: NDArray[np.float32]) -> list[float]:
    """What the squares of the gradients add up to, by bucket: the same numbers however tables are cut into parts."""
    of_rows = np.square(gradients, dtype=np.float64).sum(axis=1)
    found: list[float] = np.bincount(buckets_of(rows), of_rows, BUCKETS).tolist()
    return [one for one in found if one]


def _gone_on(question: Pull | Numbers | Count | Read) -> Letter:
    """There is no way back to what was asked for."""
    match question:
        case Pull() | Numbers():
            return Letter(Pulled(question.ticket, question.slice, -1))
        case Count():
            return Letter(Counted(question.ticket, question.slice, -1, []))
        case Read():
            return Letter(Contents(question.ticket, question.slice, -1))
