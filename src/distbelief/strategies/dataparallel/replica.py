"""The all-reduce replica: how one step is computed, added up over the members and applied. A step is a transaction.

The training loop (worker/training.py) calls `compute(t)` and `commit(t)` on every member of the generation.

`compute(t)` turns this member's shards into partial sums.

1. Plan. `_work_of` gives this member's shards, the slots that they are computed into, and the order in which all
   partial sums of all members are added. The plan is pure (flatmodel/rules/stepwork.py). `exchange.begin` announces it.
2. Compute. `_compute_unit` fetches a shard's batch and hands it to `ShardComputer.begin` (flatmodel/compute.py):
   forward, loss, backward. `GradientCapture` (flatmodel/capture.py) writes every gradient into the shard's slot as soon
   as autograd has it.
3. Publish. When all gradients of a tile are there, the function from `_tile_adder` adds the tile to that of the
   sibling shard in the tree. In the last shard it then calls `exchange.publish`, while the backward pass continues: the
   member that owns the tile may read this partial sum.

In a step that is rechecked, `commit` first compares checksums of shards that two members computed
(flatmodel/recheck.py), and publishes all tiles afterwards.

`commit(t)` adds the partial sums of all members and updates the state.

4. Contribute. `exchange.share` tells all members this member's loss rows, untouched marks and integer buffers, and
   waits for theirs. While it waits, `_meanwhile` computes backup copies of the shards of a late member (`Helper`);
   when `_meanwhile` finds none, `share` adds up complete tiles. When `share` returns, the step is *certain*: on one
   host, all that the update reads is in memory that outlives the members, and no member writes to it until the step is
   applied.
5. Judge. `judge_rows` (flatmodel/rules/stepwork.py) gives the loss and the fingerprint of the step, or raises because
   a loss or a weight is not finite or integer buffers disagree. All members judge the same rows, so all come to the
   same verdict.
6. Update. Rank 0 keeps the result and the integer buffers. For every tile of this member `_update` takes the sum
   (`exchange.reduced`: in tree order, out of place; with clipping all sums first, for the norm), copies the tile's old
   bytes to the undo log (`ReplicaState.open`, flatmodel/state.py), runs the optimizer (`TileUpdates.apply`,
   flatmodel/tileoptimizer.py) and marks the tile as done (`ReplicaState.close`). Float buffers are averaged likewise.
7. Settle. `exchange.applied` announces it; `_look_ahead` fetches the next batch meanwhile; `exchange.settle` returns
   when all members have applied the step. Then the slots may be written again.

After a death the members that are left form a new generation, with new replicas over the same memory. `agree_on_state`
(agreement.py) puts a torn tile's old bytes back. If the step was certain, the new generation finishes it: `_update`
skips the tiles that have the step already (`ReplicaState.has`). If it was not, `_plan_takeover` reuses the partial sums
that were published, also by members that died, and computes the missing ones.

Members of one host share the state, and each updates its own tiles. Members that share no memory have a state each, and
every member updates all tiles (`exchange.shares_state`, `exchange.tiles`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distbelief.errors import DistBeliefError
from distbelief.shards import Range, shard_seed
from distbelief.steadyclock import CLOCK
from distbelief.strategies.base import (
    Applied,
    BeginFrom,
    Division,
    Fetch,
    RolledBack,
    Seat,
    StepResult,
    Takeover,
    Task,
    nothing_saved,
)
from distbelief.strategies.dataparallel.agreement import MixedDevices, agree_on_state
from distbelief.strategies.dataparallel.committed import CommittedModel
from distbelief.strategies.dataparallel.witness import DisputeRecord, Witness
from distbelief.strategies.flatmodel.compute import ShardComputer, ShardResult
from distbelief.strategies.flatmodel.copying import TileCopies
from distbelief.strategies.flatmodel.recheck import Recheck
from distbelief.strategies.flatmodel.rules.stepwork import (
    COUNTS,
    WEIGHT,
    LateMember,
    ShardWork,
    StepWork,
    judge_rows,
    plan_finish,
    plan_step,
    plan_takeover,
    slots_needed,
    worth_a_backup,
)
from distbelief.strategies.flatmodel.state import ReplicaState
from distbelief.strategies.flatmodel.tileoptimizer import Recipe, TileMemory, TileUpdates, set_buffers
from distbelief.transport.abort import Aborted
from distbelief.transport.exchange import ROW, Backup, Backups, Contribution, Exchange, StepPlan, tile_views
from distbelief.transport.shm.segment import Memory


class DataParallelReplica(TileCopies):
    """See `Replica`. With `exact` off, a member's shards are fused into one batch: one unit of work per member.

    Subclasses: `DeviceReplica` (accelerators), `CompressedReplica` (compressed gradients), `LocalReplica` (local_sgd).
    """

    def __init__(
        self, computer: ShardComputer, recipe: Recipe, schedule: Division, seat: Seat, exchange: Exchange, fetch: Fetch,
        exact: bool, begin_from: BeginFrom = nothing_saved,
    ) -> None:  # fmt: skip
        self.model = computer.model
        self.exchange = exchange
        self._computer = computer
        self._job = computer.job
        self._schedule = schedule
        self._seat = seat
        self._fetch = fetch
        self._exact = exact
        self._state = ReplicaState(computer.layout, recipe, exchange, len(computer.integer_bytes()))
        self._writes_for_all = exchange.rank == 0 or not exchange.shares_state
        self._recipe = recipe
        self._agree(begin_from)
        computer.bind_parameters(self._state.memory, self._state.values_at)
        computer.commit_integers(self._state.integers(self._state.steps_applied))
        self._is_certain = exchange.shares_state and self._state.is_applied_in_part
        self._takeover = self._plan_takeover(self._state.steps_applied)
        self._mixed_devices = None if exact else MixedDevices(computer, self._state, exchange)
        self._committed = computer.committed_buffers(self._state.memory, self._state.values_at)
        self._whole = CommittedModel(computer, self._committed)
        self._tiles = [t for t in exchange.tiles if t < computer.layout.parameter_tiles]
        self._buffer_tiles = [t for t in exchange.tiles if t >= computer.layout.parameter_tiles]
        # With an undo log tile by tile, while the tile is in the cache; without one, a single call for all is quicker.
        self._tiles_at_once = [[t] for t in self._tiles] if exchange.shares_state else [self._tiles]
        self._one_by_one = exchange.shares_state and computer.job.clip_norm is None
        memory = [TileMemory(t, self._state.values[t], self._state.optimizer[t]) for t in self._tiles]
        self._updates = TileUpdates(computer.job.seed, recipe, computer.layout, memory, apart=exchange.shares_state)
        self._copies = []
        self._ahead: tuple[int, Any] = (-1, None)
        self._work = lru_cache(maxsize=4)(self._plan)
        self._slot_tiles: dict[int, list[torch.Tensor]] = {}
        self._rows = np.zeros((schedule.shards, ROW))
        self._touched = np.zeros(len(computer.layout.entries), np.uint8)
        self.comm_s = 0.0
        self._helper = None
        if exchange.backups and exact:
            self._helper = Helper(
                exchange.backups, slots_needed(schedule.shards, seat.ranges[seat.rank]), self._back_up
            )
        self._began_at = self._unit_s = 0.0
        first = self._state.steps_applied
        self._recheck = Recheck(computer, seat, first, self._gather, exchange.slot, self._check)
        self._is_rechecked = False
        """Whether the step under way is rechecked."""
        self._news: list[str] = []
        self._witness = None
        if seat.recheck.whole and exchange.shares_state:
            record = DisputeRecord(exchange)
            record.require_none()
            if exchange.size > 1:
                self._witness = Witness(computer, recipe, seat, self._state, exchange, self._recheck, record)

    def _agree(self, begin_from: BeginFrom) -> None:
        """Agree on the generation's state before any other use of it."""
        agree_on_state(self._state, self.exchange, self._computer, self._recipe, begin_from)

    def steps_applied(self) -> int:
        return self._state.steps_applied

    def taken_over(self) -> Takeover | None:
        if self._takeover is None:
            return None
        return Takeover(self._takeover[0], self._takeover[1].recomputed, self._is_certain)

    def remembered(self, first: int) -> list[Applied]:
        return self._state.remembered(first)

    def note(self) -> tuple[int, bytes]:
        return self._state.note()

    def keep_note(self, content: bytes) -> None:
        if self._writes_for_all:
            self._state.write_note(self._state.steps_applied, content)

    def _stamp(self, step: int) -> int:
        """The step's number in the exchange."""
        return step

    def _plan(self, occupied: int) -> StepWork:
        ranges, rank = self._seat.ranges, self._seat.rank
        if self._exact:
            return plan_step(self._schedule.shards, occupied, ranges, rank)
        busy = sum(1 for first, _ in ranges if first < occupied)
        fused = plan_step(len(ranges), busy, [(member, member + 1) for member in range(len(ranges))], rank)
        parts = {ranges[rank]: 0} if fused.partials.results else {}
        return replace(fused, mine=[ranges[rank]], partials=replace(fused.partials, results=parts))

    def _plan_takeover(self, step: int) -> tuple[int, StepWork] | None:
        """The step that an earlier generation began, and the plan to finish it. Fused batches have other contents now,
        so they are recomputed unless the step is certain."""
        if step >= self._seat.steps or not (self._exact or self._is_certain):
            return None
        held = self.exchange.published_sums(self._stamp(step))
        if held and not self._exact:
            return step, plan_finish(held)
        shards, occupied = self._schedule.shards, self._schedule.occupied(step)
        plan = plan_takeover(shards, occupied, held or [], self.exchange.size, self._seat.rank)
        if self._is_certain and plan.recomputed:
            raise DistBeliefError(
                f"the weights in shared memory are in the middle of step {step}; its partial sums are gone: members "
                "changed too often before it was finished",
                hint="go back to the last checkpoint: distbelief resume",
            )
        return None if held is None else (step, plan)

    def _work_of(self, step: int) -> StepWork:
        if self._takeover and self._takeover[0] == step:
            return self._takeover[1]
        return self._work(self._schedule.occupied(step))

    def _shards_of(self, work: ShardWork) -> Range:
        return (work.shard, work.shard + 1) if self._exact else self._seat.ranges[self._seat.rank]

    def compute(self, step: int) -> None:
        work = self._work_of(step)
        self.exchange.begin(StepPlan(self._stamp(step), work.sources, work.order, self._one_by_one))
        self._began_at = time.perf_counter()
        self._is_rechecked = step == self._recheck.due
        if self._is_rechecked:
            self._recheck.begin(step, self._schedule.occupied(step), work)
        units = work.partials.work
        self._compute_units(step, units)
        self._unit_s = (time.perf_counter() - self._began_at) / max(len(units), 1)
        if not units and not self._is_rechecked:
            self._publish_all()

    def _compute_units(self, step: int, units: Sequence[ShardWork]) -> None:
        self._rows.fill(0)
        self._touched.fill(0)
        for number, unit in enumerate(units):
            backup = None
            if self._helper and self.exchange.backups:
                self.exchange.backups.starting(number + 1)
                if number and not self._is_rechecked:
                    backup = self.exchange.backups.find(unit.shard, step + 1)
            last = number + 1 == len(units) and not self._is_rechecked
            if backup:
                self._take(unit, backup, last)
            else:
                self._compute_unit(step, unit, last)

    def _publish_all(self) -> None:
        for tile in self._computer.layout.tiles:
            self.exchange.publish(tile.index)

    def _compute_unit(self, step: int, unit: ShardWork, last: bool) -> None:
        first, end = self._shards_of(unit)
        ahead, self._ahead = self._ahead, (-1, None)
        self.exchange.working(first)
        batch, samples = ahead[1] if ahead[0] == step else self._fetch(step, first, end)
        tile_ready = self._tile_adder(unit, last)
        seed, slot = shard_seed(self._job.seed, step, first), self.exchange.slot(unit.slot)
        self._computed(first, samples, self._computer.begin(batch, samples, seed, slot, self._committed, tile_ready))
        if self._is_rechecked:
            self._recheck.in_slot(first, slot)

    def _computed(self, shard: int, samples: int, result: Callable[[], ShardResult]) -> None:
        found = result()
        self.exchange.working(-1)
        self._rows[shard] = (found.loss_sum, found.weight, found.integers, samples)
        self._touched |= found.touched
        if self._is_rechecked:
            self._recheck.reported(shard, self._rows[shard].tobytes() + found.touched.tobytes())

    def _tile_adder(self, unit: ShardWork, last: bool) -> Callable[[int], None]:
        """Returns a callback for tiles of this shard whose gradients are complete. It adds the tile along the tree
        (`unit.additions`); in this member's `last` shard it then publishes the tile."""
        views = self._tile_views

        def tile_ready(tile: int) -> None:
            for into, other in unit.additions:
                views(into)[tile].add_(views(other)[tile])
            if last:
                self.exchange.publish(tile)

        return tile_ready

    def _take(self, unit: ShardWork, backup: Backup, last: bool) -> None:
        """Use another member's backup copy of a shard of this member."""
        tile_ready = self._tile_adder(unit, last)
        for tile, (mine, theirs) in enumerate(zip(self._tile_views(unit.slot), backup.tiles, strict=True)):
            mine.copy_(theirs)
            tile_ready(tile)
        self._rows[unit.shard] = backup.row
        self._touched |= backup.touched

    def _back_up(self, step: int, shard: int, slot: int) -> tuple[np.ndarray, np.ndarray]:
        return self._compute_apart(step, shard, self.exchange.slot(slot))

    def _compute_apart(self, step: int, shard: int, into: Memory) -> tuple[np.ndarray, np.ndarray]:
        """Compute a shard that is no work of this member, into memory that no sum includes. Returns (row, touched)."""
        batch, samples = self._fetch(step, shard, shard + 1)
        seed = shard_seed(self._job.seed, step, shard)
        self.exchange.working(shard)
        try:
            result = self._computer.run(batch, samples, seed, into, self._committed, lambda tile: None)
        finally:
            self.exchange.working(-1)
        return np.array((result.loss_sum, result.weight, result.integers, samples)), result.touched

    def _check(self, step: int, shard: int, into: Memory) -> bytes:
        row, touched = self._compute_apart(step, shard, into)
        return row.tobytes() + touched.tobytes()

    def _meanwhile(self, step: int) -> bool:
        if self._helper is None or (self._takeover and self._takeover[0] == step):
            return False
        elapsed_s = time.perf_counter() - self._began_at
        return self._helper.help(step, partial(self._shards_of_rank, step), elapsed_s, self._unit_s)

    def _shards_of_rank(self, step: int, rank: int) -> range:
        first, end = self._seat.ranges[rank]
        return range(first, min(end, self._schedule.occupied(step)))

    def _tile_views(self, slot: int) -> list[torch.Tensor]:
        if slot not in self._slot_tiles:
            self._slot_tiles[slot] = tile_views(self.exchange.slot(slot), self._computer.layout.tiles)
        return self._slot_tiles[slot]

    def commit(self, step: int) -> StepResult:
        helped_s = self._helper.seconds if self._helper else 0.0
        if self._helper:
            self._helper.begin()
        work = self._work_of(step)
        if self._is_rechecked:
            self._compare(step, work.partials.work)
        started = time.perf_counter()
        integers = self._computer.integer_bytes()
        nodes = list(work.partials.results.items())
        contribution = Contribution(self._rows, work.mine, nodes, self._touched == 0, integers)
        shared = self.exchange.share(contribution, partial(self._meanwhile, step))
        self.comm_s += time.perf_counter() - started
        if self._helper:
            self.comm_s -= self._helper.seconds - helped_s  # time spent on backups is computing, not waiting
        result, untouched = self._judge(step, shared.rows), shared.untouched
        weight = math.fsum(shared.rows[:, WEIGHT])
        if weight == 0:  # no gradient counts: parameters stay as they are; buffers have seen the samples
            untouched = untouched.copy()
            untouched[: len(self._computer.parameters)] = True
        # Rank 0 writes the result and the integer buffers before it closes tile 0. A generation that finds tile 0
        # closed need not write them again, and other members may then close the last tile.
        if self._writes_for_all and not self._state.has(0, step):
            self._remember(step, result, CLOCK.now())
            self._state.write_integers(step + 1, shared.integers)
        units = int(np.count_nonzero(shared.rows[:, COUNTS]))
        self._update(step, 1.0 / weight if weight else 0.0, units, untouched)
        if self._mixed_devices:
            self._mixed_devices.take_one_state()
        self.exchange.applied()
        self._look_ahead(step + 1)
        started = time.perf_counter()
        self.exchange.settle()
        self.comm_s += time.perf_counter() - started
        helped = self._helper is not None and self._helper.seconds > helped_s
        self._computer.commit_integers(shared.integers if helped or integers != shared.integers else None)
        return result

    def _compare(self, step: int, units: Sequence[ShardWork]) -> None:
        """Recheck the step, and publish this member's sums."""
        self._news += self._recheck.compare(step, lambda: self._compute_units(step, units))
        self._is_rechecked = False
        self._publish_all()

    def _gather(self, payload: bytes) -> list[bytes]:
        started = time.perf_counter()
        found = self.exchange.gather(payload)
        self.comm_s += time.perf_counter() - started
        return found

    def _remember(self, step: int, result: StepResult, at: float) -> None:
        generation = self._seat.generation
        self._state.remember(Applied(step, result.loss, result.samples, result.fingerprint, generation, at))

    def _look_ahead(self, step: int) -> None:
        """Fetch the next step's first batch while others finish this one."""
        if step >= self._seat.steps:
            return
        work = self._work(self._schedule.occupied(step)).partials.work
        if work:
            self._ahead = (step, self._fetch(step, *self._shards_of(work[0])))

    def _judge(self, step: int, rows: np.ndarray) -> StepResult:
        return judge_rows(step, rows)

    def _update(self, step: int, scale: float, units: int, untouched: np.ndarray) -> None:
        if self._copies:
            self._finish_copies()
        factor, within = scale, 1.0  # factors of the gradients: in a pass of its own, and within the optimizer's pass
        if self._job.clip_norm is not None:
            factor = self._clip_factor(scale, step)
        elif self._updates.may_scale(scale):
            factor, within = 1.0, scale
        rate = self._job.rate_factor(step)
        if self._witness:
            gradient, average = partial(self._reduced, factor=factor), partial(self._average, units)
            self._witness.expect(step, gradient, average, rate, untouched, within)
        for some in self._tiles_at_once:
            gradients = {tile: self._reduced(tile, factor) for tile in some if not self._state.has(tile, step)}
            for tile in gradients:
                self._state.open(tile, step)
            self._updates.apply(step, gradients, rate, untouched, within)
            for tile in gradients:
                self._close(tile, step)
        for tile in self._buffer_tiles:
            if self._state.has(tile, step):  # the generation that began this commit has updated it
                continue
            values = self._average(units, tile)
            self._state.open(tile, step)
            set_buffers(self._state.values[tile], values, self._computer.layout.pieces[tile], untouched)
            self._close(tile, step)

    def _close(self, tile: int, step: int) -> None:
        """A tile of this member has the step."""
        if self._witness:
            self._witness.confirm(step, tile)
        self._state.close(tile, step)

    def _average(self, units: int, tile: int) -> torch.Tensor:
        """The average of a tile of float buffers over the step's shards."""
        return self._reduced(tile).div_(units)

    def _reduced(self, tile: int, factor: float = 1.0) -> torch.Tensor:
        """The step's sum of a tile, times the factor."""
        started = time.perf_counter()
        gradient = self.exchange.reduced(tile) if factor == 1.0 else self.exchange.scaled(tile, factor)
        self.comm_s += time.perf_counter() - started
        return gradient

    def _clip_factor(self, scale: float, step: int) -> float:
        """Scale the gradients; then min(1, limit / norm). The norm is taken per tile in float64, and tiles are the
        same for any number of members."""
        squares = self._squares(self._tiles, scale)
        started = time.perf_counter()
        everybody = self.exchange.share_squares(squares)
        self.comm_s += time.perf_counter() - started
        if self._witness:
            self._witness.confirm_squares(step, self._squares(self._witness.parameter_tiles, scale), everybody)
        return self._job.clip_factor(math.sqrt(math.fsum(everybody)))

    def _squares(self, tiles: Sequence[int], scale: float) -> dict[int, float]:
        """Scale the gradients of these tiles; their squared norms."""
        return {
            tile: float(torch.linalg.vector_norm(self._reduced(tile, scale), dtype=torch.float64)) ** 2
            for tile in tiles
        }

    def measure(self, tasks: Sequence[Task], measure: Callable[[Task, Any, Any], None]) -> None:
        rank, size = self.exchange.rank, self.exchange.size
        self._whole.measure(tasks[rank * len(tasks) // size : (rank + 1) * len(tasks) // size], measure)

    def save_weights(self, path: Path) -> None:
        if self.exchange.rank == 0:
            self._whole.save(path)

    def weights_sha256(self) -> str:
        return "" if self.exchange.rank > 0 and self.exchange.shares_state else self._whole.sha256()

    def waits(self) -> Mapping[int, float]:
        return {}

    def traffic(self) -> tuple[int, int]:
        return 0, 0

    def helped(self) -> int:
        return self._helper.count if self._helper else 0

    def plan_lines(self) -> Sequence[str]:
        lines, self._news = self._news, []
        return lines

    def rolled_back(self) -> RolledBack | None:
        return None

    def synchronise(self) -> None:
        """Bring the model's buffers to the committed values."""
        self._whole.restore()


Compute = Callable[[int, int, int], tuple[np.ndarray, np.ndarray]]
"""(step, shard, slot) -> (row, touched) of the shard, computed into that slot of this member."""


class Helper:
    """Computes backup copies of late members' shards while this member waits in `exchange.share`."""

    def __init__(self, backups: Backups, first_slot: int, compute: Compute) -> None:
        self._backups = backups
        self._first_slot = first_slot
        self._compute = compute
        self._slots = 0
        self.seconds = 0.0
        """Spent on backups, over all steps."""
        self.count = 0

    def begin(self) -> None:
        self._slots = 0

    def help(self, step: int, work: Callable[[int], Sequence[int]], elapsed_s: float, mine_s: float) -> bool:
        """Compute one backup if one is worth it. `work`: rank -> its shards of this step. False: there was none."""
        late = [LateMember(work(rank), begun) for rank, begun in self._backups.late(step + 1)]
        wanted, slot = worth_a_backup(late, elapsed_s, mine_s), self._first_slot + self._slots
        if not wanted or not self._backups.has_room(slot):
            return False
        shard = next((s for s in wanted if self._backups.claim(s, step + 1)), -1)
        if shard < 0:
            return False
        started = time.perf_counter()
        self._slots += 1
        try:
            row, touched = self._compute(step, shard, slot)
        except Aborted:
            raise
        except Exception:
            # The late member may have finished its shard, and the others may update what this member was reading. If
            # the shard itself is at fault, its owner reports it.
            return True
        finally:
            self.seconds += time.perf_counter() - started
        self._backups.offer(shard, step + 1, slot, row, touched)
        self.count += 1
        return True
