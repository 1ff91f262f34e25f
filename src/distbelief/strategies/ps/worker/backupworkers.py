"""`ps:sync:backups=B` on a worker: a member that has done its shards computes missing shards of late members.

The first copy of a partial sum counts; all copies have the same bits. So a step is applied without its late member. A
late member is at most one step behind: the next step is applied only when it has begun that step, too. No gradient is
thrown away: a late member does not compute shards that others have computed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from functools import partial

import numpy as np

from distbelief.shards import Range, Schedule, shard_seed
from distbelief.strategies.base import Fetch as FetchBatch
from distbelief.strategies.base import Seat, StepResult
from distbelief.strategies.flatmodel.compute import ShardComputer
from distbelief.strategies.flatmodel.rules.stepwork import ShardWork, reached, slots_needed
from distbelief.strategies.flatmodel.tileoptimizer import Recipe
from distbelief.strategies.ps.protocol.client import Idle
from distbelief.strategies.ps.protocol.messages import Inspect, Inspected, Question, StepBegun
from distbelief.strategies.ps.rules.gathering import LATE, choose_late_shards
from distbelief.strategies.ps.tables.remote import RemoteTables
from distbelief.strategies.ps.worker.exchange import ServerExchange
from distbelief.strategies.ps.worker.synchronous import SynchronousReplica, measure_step
from distbelief.transport.abort import Aborted

USUAL = 0.85
"""After this part of the usual time of a step, a member asks before each shard whether others have computed it."""
SHORTEST_S = 0.002
"""The least time that is assumed for a shard."""
LOOK_AGAIN_S = 0.01
LATER_S = 0.05


class BackupWorkerReplica(SynchronousReplica):
    _maps_values = False  # a late member still computes with values that servers change

    def __init__(
        self, computer: ShardComputer, recipe: Recipe, schedule: Schedule, seat: Seat, exchange: ServerExchange,
        fetch: FetchBatch, tables: RemoteTables, backups: int,
    ) -> None:  # fmt: skip
        self._late_members = backups
        self._step = -2  # no step, and none before the first
        self._passed = False
        """The step that this member computes was applied without it."""
        self._done: list[ShardWork] = []
        self._copied: set[int] = set()
        self._began_at = self._shard_s = self._helped_s = 0.0
        self._usual_s = float("inf")
        self._count = np.frombuffer(exchange.memory("helped", 8).buffer, np.int64, 1)
        self._first_slot = slots_needed(schedule.shards, seat.ranges[seat.rank])
        super().__init__(computer, recipe, schedule, seat, exchange, fetch, tables)

    def helped(self) -> int:
        return int(self._count[0])

    # --- as a member that may be late --------------------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        self._step, self._began_at, self._passed = step, time.perf_counter(), False
        self._done, self._copied = [], set()
        self._client.push(0, StepBegun(step, self._seat.generation, self._seat.rank))
        self._client.flush()

    def _units(self, step: int) -> Iterator[ShardWork]:
        for unit in super()._units(step):
            if self._done and self._elapsed_s() > USUAL * self._usual_s and self._is_there(step, unit.shard):
                break
            yield unit
            self._done.append(unit)

    def compute(self, step: int) -> None:
        super().compute(step)
        if self._done:  # a device has computed a shard only when its sum has been copied from there
            self._shard_s = self._elapsed_s() / len(self._done)

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._began_at

    def _is_there(self, step: int, shard: int) -> bool:
        looked = self._look_briefly()
        self._passed = looked.version > step
        return self._passed or any(first <= shard < end for first, end in looked.nodes)

    def _look_briefly(self) -> Inspected:
        """Ask one slice: pushes of a member reach all slices, unless it dies."""
        found: list[Inspected] = []
        self._client.ask([_look], self.exchange.abort, lambda framed: found.append(framed.message))
        return found[0]

    def _sums(self, step: int) -> dict[Range, int]:
        if self._passed:
            return {}
        whole = super()._sums(step)
        return whole if len(self._done) == len(self._work_of(step).partials.work) else reached(self._done)

    def _leaves_out_somebody(self, step: int) -> bool:
        return False  # all members send `StepBegun`

    def _measure(self, step: int) -> partial[Question]:
        return partial(measure_step, step, self._seat.generation, self.exchange.size)

    # --- as a helper -------------------------------------------------------------------------------------------------

    def commit(self, step: int) -> StepResult:
        self._helped_s = 0.0
        result = super().commit(step)
        self.comm_s -= self._helped_s  # helping is computing
        self._usual_s = self._elapsed_s()
        return result

    def _meanwhile(self, step: int, told: Collection[int]) -> Idle | None:
        if step != self._step or (self._takeover and self._takeover[0] == step):
            return None
        return partial(self._help, step, told)

    def _help(self, step: int, told: Collection[int]) -> float:
        """Compute one shard of a late member, if one is late. Returns the seconds until the next look."""
        shard_s = max(self._shard_s, SHORTEST_S)
        first_late_s = LATE * shard_s * min(end - first for first, end in self._seat.ranges)
        if self._elapsed_s() < first_late_s and len(self._done) == len(self._work_of(step).partials.work):
            return first_late_s - self._elapsed_s()
        looked = self._look_briefly()
        if told or looked.version > step:  # the new values are on their way
            return LATER_S
        there = {shard for first, end in looked.nodes for shard in range(first, end)}
        missing = set(range(self._schedule.occupied(step))) - there
        if not missing:
            if self.exchange.rank > 0:  # rank 0, which usually sends `ApplyStep`, may be the late member
                self._go(step)
            return LATER_S
        ranges, rank = self._seat.ranges, self._seat.rank
        found = choose_late_shards(missing, ranges, rank, self._late_members, self._elapsed_s(), shard_s)
        shard = next((shard for shard in found if shard not in self._copied), -1)
        if shard < 0:
            return max(shard_s, LOOK_AGAIN_S)
        self._copy(step, shard)
        return 0.0

    def _copy(self, step: int, shard: int) -> None:
        started = time.perf_counter()
        slot = self._first_slot + len(self._copied)
        self._copied.add(shard)
        self.exchange.working(shard)
        try:
            batch, samples = self._fetch(step, shard, shard + 1)
            seed, into = shard_seed(self._job.seed, step, shard), self.exchange.room(slot)
            result = self._computer.run(batch, samples, seed, into, self._buffers, lambda tile: None)
            self.exchange.bring(slot)
        except Aborted:
            raise
        except Exception:
            return  # if the shard itself is at fault, its owner reports it
        finally:
            self.exchange.working(-1)
            self._helped_s += time.perf_counter() - started
        self._rows[shard] = (result.loss_sum, result.weight, result.integers, samples)
        self._push(step, (shard, shard + 1), slot, result.touched)
        self._client.flush()
        self._count[0] += 1


def _look(ticket: int) -> Question:
    return Inspect(ticket, 0, briefly=True)
