"""The local_sgd replica: a round is the transaction, and the outer step is the commit of allreduce.

A unit of work is one replica of the model. The member takes the replica's local steps (`LocalTrainer.train`); the
difference from the committed parameters goes to the slot that has a shard's gradients in allreduce. Partial sums,
takeover, the commit and the tree order are those of `DataParallelReplica`. Inside, this class counts rounds; its
methods take and return steps.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from distbelief.checkpoint.sources import MODEL
from distbelief.compression.exchanges.partialsums import CodedParts
from distbelief.compression.parts import PartsCoding
from distbelief.errors import DistBeliefError, JobError
from distbelief.strategies.base import (
    Applied,
    BeginFrom,
    Fetch,
    RolledBack,
    Saved,
    Seat,
    StepResult,
    Takeover,
    nothing_saved,
)
from distbelief.strategies.dataparallel.replica import DataParallelReplica
from distbelief.strategies.flatmodel.compute import make_model
from distbelief.strategies.flatmodel.copying import Copy
from distbelief.strategies.flatmodel.rules.stepwork import ShardWork, StepWork, judge, plan_apart
from distbelief.strategies.flatmodel.tileoptimizer import Recipe
from distbelief.strategies.localsgd.innerstates import InnerStates, LocalPortion, inner_states, is_inner
from distbelief.strategies.localsgd.rules.rounds import Rounds
from distbelief.strategies.localsgd.trainer import NO_CHECKSUM, NUMBERS_PER_STEP, LocalTrainer, RoundStart
from distbelief.transport.exchange import ROW, Exchange, Source
from distbelief.transport.shm.segment import Segment

_WEIGHT, _INTEGERS, _SAMPLES = 1, 2, 3
_SEEN = struct.Struct("qq")  # a generation, and the steps applied at its start or later


class LocalReplica(DataParallelReplica):
    """See `Replica`. `outer`: the optimizer of the outer step."""

    def __init__(
        self, trainer: LocalTrainer, outer: Recipe, rounds: Rounds, seat: Seat, inner: InnerStates, fetch: Fetch,
        begin_from: BeginFrom = nothing_saved,
    ) -> None:  # fmt: skip
        self._trainer = trainer
        self._rounds = rounds
        self._inner = inner
        self._begin_from = begin_from
        self._went_back: RolledBack | None = None
        self._interrupted = False
        self._seen: np.ndarray | None = None
        """This process's last generation, and the steps that it has seen applied; kept over generations. None: all
        members share one state."""
        if not inner.exchange.shares_state:
            self._seen = np.frombuffer(inner.exchange.state(_SEEN.size, "seen").buffer, np.int64, 2)
        within = replace(seat, steps=rounds.count)
        super().__init__(trainer, outer, rounds, within, inner.exchange, fetch, True, self._begin)
        if self.exchange.rank == 0:
            self._see()  # from here on rank 0 reports a rollback; the other members trust that after the first commit
        # clipping and the schedule are for local steps
        self._job = replace(trainer.job, clip_norm=None, schedule=None)
        self._rows = np.zeros((rounds.replicas, ROW + NUMBERS_PER_STEP * rounds.local))
        coding, replicas = trainer.coding, rounds.replicas
        owing = 4 * coding.elements if coding else 0
        copied = replicas * (len(trainer.kept) - owing) if inner.copies else 0
        self._traffic = TrafficCount(inner.exchange, coding, replicas, copied)
        self._helper = None  # no backups: an inner state has one writer, and a backup would repeat all local steps

    # --- what a generation goes on from ------------------------------------------------------------------------------

    def _begin(self, step: int = -1) -> Saved | None:
        saved = self._begin_from(step)
        if saved is None:
            return None
        rounds = self._rounds.done(saved.step)
        inner = {name: tensor for name, tensor in saved.tensors.items() if is_inner(name)}
        others = {name: tensor for name, tensor in saved.tensors.items() if name not in inner}
        states: Sequence[torch.Tensor] = [torch.zeros_like(self._trainer.kept)] * self._rounds.replicas
        if saved.step:  # otherwise weights alone: the optimizers start without state
            states = inner_states(
                inner, self._trainer.layout, self._trainer.recipe, self._rounds.replicas, self._trainer.coding
            )
        self._inner.set(rounds, states)
        return replace(saved, step=rounds, tensors=others)

    def _agree(self, begin_from: BeginFrom) -> None:
        super()._agree(begin_from)
        if self._seen is None:
            return
        self._seen[1] = max(int(self._seen[1]), self.steps_applied())
        self._interrupted, lost = self._inner.agree(self._state.steps_applied)
        if lost:
            self._state.forget()
            super()._agree(self._begin_again)
            self._inner.agree(self._state.steps_applied)
        # A generation that went back may have been given up before rank 0 reported it. So what was reached is asked of
        # the members, and the latest generation's answer counts.
        _, reached = max(_SEEN.unpack(theirs) for theirs in self.exchange.gather(_SEEN.pack(*self._seen)))
        if reached > self.steps_applied():
            source = "checkpoint" if self.steps_applied() else "where the run began"
            self._went_back = RolledBack(reached, self.steps_applied(), source)

    def _see(self) -> None:
        if self._seen is not None:
            self._seen[:] = self._seat.generation, self.steps_applied()

    def _begin_again(self, step: int = -1) -> Saved | None:
        return self._begin(step) or self._begin_anew()

    def _begin_anew(self) -> Saved:
        """The job's initial values, made again, because no member has them any more."""
        job = self._trainer.job
        if isinstance(job.model, torch.nn.Module):
            raise DistBeliefError(
                "the workers that had a replica's optimizer state have died, and there is no checkpoint to go back to",
                hint="save more often (--save-every), or let `model` be a function, which can be called again",
            )
        model = make_model(job, self._trainer.device)
        self._inner.set(0, [torch.zeros_like(self._trainer.kept)] * self._rounds.replicas)
        return Saved(0, {f"{MODEL}{n}": t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())})

    # --- a round -----------------------------------------------------------------------------------------------------

    def compute(self, step: int) -> None:
        number = self._rounds.done(step)
        self._inner.begin(number)
        first, end = self._seat.ranges[self._seat.rank]
        for idle in range(max(first, self._rounds.occupied(number)), end):  # no samples: the inner state stays as it is
            self._inner.write(idle, number + 1, self._inner.read(idle, number))
        try:
            super().compute(number)
        finally:
            self._trainer.bind_parameters(self._state.memory, self._state.values_at)
        self._trainer.adopt_integers()
        self._inner.send_on(number + 1)  # before the commit: a death after it loses no inner state

    def commit(self, step: int) -> StepResult:
        number = self._rounds.done(step)
        result = super().commit(number)
        self._see()
        occupied = self._rounds.occupied(number)
        self._traffic.count(self._work_of(number).sources, super()._plan(occupied).sources)
        return result

    def _plan(self, occupied: int) -> StepWork:
        """Encoded differences are not added up before they are sent."""
        if not isinstance(self.exchange, CodedParts):
            return super()._plan(occupied)
        return plan_apart(self._rounds.shards, occupied, self._seat.ranges, self._seat.rank)

    def _compute_unit(self, step: int, unit: ShardWork, last: bool) -> None:
        replica, state = unit.shard, self._state
        begin = RoundStart(state.memory, state.values_at, state.integers(step), self._inner.read(replica, step))
        trained = self._trainer.train(self._rounds, step, replica, begin, self._fetch, self.exchange.working)
        self.exchange.working(-1)
        self._trainer.write_difference(self.exchange.slot(unit.slot))
        code = self.exchange.code(unit.slot) if isinstance(self.exchange, CodedParts) else None
        self._trainer.encode_difference(self.exchange.slot(unit.slot), trained.touched, code)
        self._inner.write(replica, step + 1, self._trainer.kept)
        ready = self._tile_adder(unit, last)
        for tile in self._trainer.layout.tiles:
            ready(tile.index)
        row = self._rows[replica]
        row[_WEIGHT] = 1.0  # all replicas have equal weight in the average
        row[_INTEGERS], row[_SAMPLES] = trained.integers, trained.reported[:, -1].sum()
        row[ROW : ROW + trained.reported.size] = trained.reported.reshape(-1)
        self._touched |= trained.touched

    def _look_ahead(self, step: int) -> None:
        """Nothing to do: the next batch is prefetched by the readers, and its computation waits for the outer step."""

    def _stamp(self, step: int) -> int:
        return self._rounds.after(step)

    def _judge(self, step: int, rows: np.ndarray) -> StepResult:
        known = {float(row[_INTEGERS]) for row in rows if row[_SAMPLES] and row[_INTEGERS] != NO_CHECKSUM}
        if len(known) > 1:
            raise JobError(
                "an integer buffer of the model has other values in one replica than in another: it depends on the "
                "samples, so there is no single value to go on with"
            )
        reported = rows[:, ROW:].reshape(len(rows), -1, NUMBERS_PER_STEP)
        found = [
            judge(
                number,
                reported[:, place, 0],
                reported[:, place, 1],
                reported[:, place, 2],
                reported[:, place].tobytes(),
            )
            for place, number in enumerate(self._rounds.steps(step))
        ]
        return replace(found[-1], before=found[:-1])

    def _remember(self, step: int, result: StepResult, at: float) -> None:
        for number, one in zip(self._rounds.steps(step), (*result.before, result), strict=True):
            applied = Applied(number, one.loss, one.samples, one.fingerprint, self._seat.generation, at)
            self._state.remember(applied)

    # --- in steps ----------------------------------------------------------------------------------------------------

    def steps_applied(self) -> int:
        return self._rounds.after(self._state.steps_applied)

    def remembered(self, first: int) -> list[Applied]:
        return self._state.remembered(first, self.steps_applied())

    def note(self) -> tuple[int, bytes]:
        rounds, content = self._state.note()
        return (self._rounds.after(rounds) if rounds >= 0 else rounds), content

    def taken_over(self) -> Takeover | None:
        found = super().taken_over()
        if found is None and self._interrupted:
            found = Takeover(self._state.steps_applied, self._rounds.occupied(self._state.steps_applied))
        return replace(found, step=self._rounds.after(found.step)) if found else None

    def rolled_back(self) -> RolledBack | None:
        return self._went_back

    # --- for people --------------------------------------------------------------------------------------------------

    def traffic(self) -> tuple[int, int]:
        return self._traffic.traffic

    def plan_lines(self) -> Sequence[str]:
        return self._traffic.lines()

    # --- saving ------------------------------------------------------------------------------------------------------

    @cached_property
    def _all_portions(self) -> list[LocalPortion]:
        """Every member saves its tiles and the inner states of its replicas."""
        layout, recipe = self._trainer.layout, self._trainer.recipe
        return [
            LocalPortion(tiles, layout, recipe, range(*replicas), self._trainer.coding)
            for tiles, replicas in zip(self._portions, self._seat.ranges, strict=True)
        ]

    def portions(self) -> Sequence[Any]:
        return self._all_portions

    def copy_portion(self, applied: int, into: Segment) -> Copy:
        rounds, rank = self._rounds.done(applied), self.exchange.rank
        tiles = len(self._trainer.layout.tiles)

        def copy(piece: int, into: Segment, at_bytes: int) -> None:
            if piece < tiles:
                self._state.copy_tile(piece, into, at_bytes)
            else:
                state = self._inner.read(piece - tiles, rounds)
                into.tensor(state.dtype, at_bytes, len(state)).copy_(state)

        mine = self._all_portions[rank]
        starts = mine.tiles.starts | {tiles + replica: at for replica, at in mine.starts.items()}
        copying = Copy(copy, starts, into, self._outside(rounds) if rank == 0 else {})
        self._copies.append(copying)
        return copying


_COUNTS = 16  # bytes: two numbers


class TrafficCount:
    """Counts the bytes of compressed differences on the wire, on one member over a run. Without compression it counts
    nothing."""

    def __init__(self, exchange: Exchange, coding: PartsCoding | None, replicas: int, copied: int) -> None:
        """`copied`: bytes of inner states, without residuals, that members send each other in every round."""
        self._coded = exchange if isinstance(exchange, CodedParts) else None
        self._copied = copied
        self._owing = 4 * coding.elements * replicas if coding and copied else 0
        self._replicas = replicas
        self._news: list[str] = []
        if self._coded is not None:
            self._bytes = np.frombuffer(exchange.state(_COUNTS, "traffic").buffer, np.int64, 2)
        if coding is None or exchange.size == 1:
            return
        if self._coded is None:
            self._news.append(
                f"differences stay in shared memory, where {coding.method} saves nothing; it rounds them as elsewhere"
            )
        else:
            self._news.append(f"differences are compressed ({coding.method}): all workers get those of every replica")

    def count(self, apart: Sequence[Source], together: Sequence[Source]) -> None:
        """Count a committed round. `apart`: the sources that were added up; `together`: the sources without
        compression."""
        if self._coded is None:
            return
        wire, plain = self._coded.traffic_bytes(apart, together)
        if wire >= plain > 0 and not self._bytes[1]:
            self._news.append(
                f"{self._coded.coding.method} saves nothing on {self._coded.size} workers, since each of the "
                f"{self._replicas} replicas sends its own differences: have fewer replicas, or take int8 or topk=0.01"
            )
        self._bytes += (wire + self._copied + self._owing, plain + self._copied)

    @property
    def traffic(self) -> tuple[int, int]:
        return (0, 0) if self._coded is None else (int(self._bytes[0]), int(self._bytes[1]))

    def lines(self) -> list[str]:
        lines, self._news = self._news, []
        return lines
