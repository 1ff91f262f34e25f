"""The all-reduce replica over gloo with `--recheck all`: every sum and every update is compared before the commit.

The sums are made twice. The checkers of the shards (flatmodel/recheck.py) have partial sums too, and send them to other
members than the owners do: each tile is added by its owner, who sends the sum to all members, and by a second member,
who compares. So no bit that flips in a partial sum, on the network or in an addition gets into both sums.

The updates are made by every member, each on a copy of its own. After the update all members exchange the checksums of
their copies, together with the numbers that they had contributed to the step. A bit that flips in a state between two
steps makes the copies differ as well. Only when all agree is the step applied (`ReplicaState.close_all`).

A member may die before that. So the bytes before the update are kept: the next generation puts them back if it finds a
state whose tiles are still open.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch

from distbelief.errors import ResultsDiffer
from distbelief.strategies.base import BeginFrom, Division, Fetch, Seat, StepResult, nothing_saved
from distbelief.strategies.dataparallel.replica import DataParallelReplica
from distbelief.strategies.dataparallel.witness import contents
from distbelief.strategies.flatmodel.compute import ShardComputer
from distbelief.strategies.flatmodel.recheck import IF_AGAIN, member_names
from distbelief.strategies.flatmodel.rules.rechecks import listed, odd_copies
from distbelief.strategies.flatmodel.rules.stepwork import WEIGHT
from distbelief.strategies.flatmodel.tileoptimizer import Recipe
from distbelief.transport.exchange import StepPlan
from distbelief.transport.gloo.exchange import TorchExchange
from distbelief.transport.shm.memfd import require_memory


class _Report(msgspec.Struct):
    """What one member tells all others after its update."""

    copy: list[int]
    """The checksum of each tile of its state."""
    wrong_sums: list[int] = []
    """The tiles for which this member got another sum than their owner."""
    rows: bytes = b""
    """Of its own shards, as the next two."""
    touched: bytes = b""
    integers: bytes = b""
    used: int = 0
    """A checksum of all members' numbers, as this member received them."""


class CheckedReplica(DataParallelReplica):
    """See `Replica`. Collective: all members construct it at the same point of a generation."""

    exchange: TorchExchange

    def __init__(
        self, computer: ShardComputer, recipe: Recipe, schedule: Division, seat: Seat, exchange: TorchExchange,
        fetch: Fetch, exact: bool, begin_from: BeginFrom = nothing_saved,
    ) -> None:  # fmt: skip
        self._received = np.zeros(0)
        """The rows of all shards in this step."""
        super().__init__(computer, recipe, schedule, seat, exchange, fetch, exact, begin_from)
        reports = self._reports(_Report(self._copy()))
        self._require_equal_copies(self._state.steps_applied, reports, "at the beginning of")

    def _agree(self, begin_from: BeginFrom) -> None:
        numbers = self._state.blocks()[0]
        size_bytes = numbers.numel()
        if not self._state.initialised:  # else an earlier generation has allocated it
            require_memory("rechecks", size_bytes)
        self._before = self.exchange.state(size_bytes, _BEFORE).tensor(torch.uint8, 0, size_bytes)
        if self._state.initialised and self._state.is_applied_in_part:
            self._put_back()
        super()._agree(begin_from)

    def _put_back(self) -> None:
        self._state.blocks()[0].copy_(self._before)
        self._state.begin_at(self._state.steps_applied)

    def _judge(self, step: int, rows: np.ndarray) -> StepResult:
        self._received = rows
        return super()._judge(step, rows)

    def _update(self, step: int, scale: float, units: int, untouched: np.ndarray) -> None:
        wrong_sums = self._add_again(step)
        self._before.copy_(self._state.blocks()[0])
        super()._update(step, scale, units, untouched)
        first, end = self._seat.ranges[self._seat.rank]
        mine = _Report(
            self._copy(),
            wrong_sums,
            self._rows[first:end].tobytes(),
            self._touched.tobytes(),
            self._computer.integer_bytes(),
            _joined(self._received, untouched, self._state.integers(step + 1)),
        )
        # An abort in here leaves the tiles open. This thread may have been given up then, and must write nothing.
        reports = self._reports(mine)
        try:
            self._require_what_was_sent(step, reports)
            self._require_equal_sums(step, reports)
            self._require_equal_copies(step, reports, "from")
        except ResultsDiffer:
            self._put_back()
            raise
        self._state.close_all(step)

    def _close(self, tile: int, step: int) -> None:
        """A tile is closed when all members have compared it."""

    def _add_again(self, step: int) -> list[int]:
        """Make the sums of the step a second time. Returns the tiles of which another sum is to be applied."""
        work, shift, size = self._work_of(step), self._recheck.shift(step), self.exchange.size
        checkers = [replace(source, rank=(source.rank + shift) % size) for source in work.sources]
        started = time.perf_counter()
        again = self.exchange.add_again(StepPlan(step, checkers, work.order), self._recheck.second_sums(), shift)
        self.comm_s += time.perf_counter() - started
        return [tile for tile, value in again.items() if not _same_bits(value, self._reduced(tile))]

    def _copy(self) -> list[int]:
        return [self._state.checksum(tile) for tile in self.exchange.tiles]

    def _reports(self, mine: _Report) -> list[_Report]:
        return [msgspec.msgpack.decode(one, type=_Report) for one in self._gather(msgspec.msgpack.encode(mine))]

    # --- the comparisons: all members come to the same verdict -------------------------------------------------------

    def _require_what_was_sent(self, step: int, reports: Sequence[_Report]) -> None:
        rows = np.zeros_like(self._rows)
        for (first, end), report in zip(self._seat.ranges, reports, strict=True):
            rows[first:end] = np.frombuffer(report.rows).reshape(-1, rows.shape[1])
        touched = np.array([np.frombuffer(report.touched, np.uint8) for report in reports])
        untouched = touched.max(axis=0) == 0
        if math.fsum(rows[:, WEIGHT]) == 0:
            untouched[: len(self._computer.parameters)] = True
        expected = _joined(rows, untouched, reports[self._work_of(step).sources[0].rank].integers)
        if wrong := [rank for rank, report in enumerate(reports) if report.used != expected]:
            raise self._error(
                step, f"{self._listed(wrong)} received other losses or weights of step {step} than the members sent"
            )

    def _require_equal_sums(self, step: int, reports: Sequence[_Report]) -> None:
        found = [(tile, rank) for rank, report in enumerate(reports) for tile in report.wrong_sums]
        if not found:
            return
        _, second = min(found)
        odd = odd_copies([tuple(report.copy) for report in reports], self._hosts)
        if odd == (second,):  # that member received another sum than all others
            return
        changed = [*self._recheck.changed_sums(), *self._recheck.changed_second_sums()]
        for rank, nodes in enumerate(map(msgspec.msgpack.decode, self._gather(msgspec.msgpack.encode(changed)))):
            if nodes:
                raise self._recheck.changed_in_memory(rank, step, nodes)
        owner = (second - self._recheck.shift(step)) % self.exchange.size
        tiles = sorted(tile for tile, rank in found if rank == second)
        who = self._listed(sorted({owner, second}))
        raise self._error(
            step,
            f"{who} got different sums of the gradients of {self._parts(tiles)} in step {step}: the addition, the "
            "memory or the network of one of them is wrong",
        )

    def _require_equal_copies(self, step: int, reports: Sequence[_Report], when: str) -> None:
        copies = [tuple(report.copy) for report in reports]
        odd = odd_copies(copies, self._hosts)
        if not odd:
            return
        tiles = [tile for tile, values in enumerate(zip(*copies, strict=True)) if len(set(values)) > 1]
        others = [rank for rank in range(len(copies)) if rank not in odd]
        where = f"values of {self._parts(tiles)} {when} step {step}"
        if others:
            text = f"{self._listed(odd)} got other {where} than {self._listed(others)}: its optimizer or its memory is"
        else:
            text = f"{self._listed(odd)} got different {where}: the optimizer or the memory of one of them is"
        raise self._error(step, f"{text} wrong")

    @property
    def _hosts(self) -> Sequence[str]:
        return self._seat.hosts or [""] * self.exchange.size

    def _listed(self, ranks: Sequence[int]) -> str:
        names = member_names(self._seat)
        return listed([names[rank] for rank in ranks])

    def _parts(self, tiles: Sequence[int]) -> str:
        return contents(self._computer.layout, tiles)

    def _error(self, step: int, message: str) -> ResultsDiffer:
        return ResultsDiffer(f"{message}. {self._recheck.last_good(step)}", IF_AGAIN, step, -1)


_BEFORE = "state before the step"


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _joined(rows: np.ndarray, untouched: np.ndarray, integers: bytes) -> int:
    return zlib.crc32(integers, zlib.crc32(untouched.astype(np.uint8).tobytes(), zlib.crc32(rows.tobytes())))
