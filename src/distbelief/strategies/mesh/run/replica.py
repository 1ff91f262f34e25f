"""A member of a mesh: it trains its part of the model on its part of the data, and commits each step together with all
other members.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distbelief.data.sources import seed_everything
from distbelief.shards import Schedule, mix, shard_seed
from distbelief.steadyclock import CLOCK
from distbelief.strategies.base import Applied, Fetch, RolledBack, Seat, StepResult, Takeover, Task
from distbelief.strategies.flatmodel.copying import Copy
from distbelief.strategies.flatmodel.layout import trainable
from distbelief.strategies.flatmodel.rules.stepwork import judge
from distbelief.strategies.mesh.rules.agreement import CommitDecision
from distbelief.strategies.mesh.run.gradientsum import CompressedSum, DataParallelSum, TiedSum
from distbelief.strategies.mesh.run.groups import MeshGroups
from distbelief.strategies.mesh.run.runner import Outcome, StageRunner
from distbelief.strategies.mesh.state.member import MeshMember
from distbelief.strategies.mesh.state.memberstate import MemberState
from distbelief.strategies.mesh.state.saving import MeshPortion, WholeWeights, copy_of, portions
from distbelief.strategies.mesh.state.snapshots import Snapshots
from distbelief.strategies.rules.degrees import Degrees
from distbelief.transport.shm.segment import Segment

_LOSS, _WEIGHT, _COUNT = range(3)


class MeshReplica:
    """See `Replica`."""

    def __init__(
        self, member: MeshMember, schedule: Schedule, seat: Seat, runner: StageRunner, snapshots: Snapshots,
        fetch: Fetch, rolled_back: RolledBack | None,
    ) -> None:  # fmt: skip
        self.exchange = member.groups.world
        self.comm_s = 0.0
        self._member = member
        self._state: MemberState = member.state
        self._job = member.job
        self._schedule = schedule
        self._seat = seat
        self._degrees: Degrees = member.groups.degrees
        self._groups: MeshGroups = member.groups
        self._runner = runner
        self._snapshots = snapshots
        self._fetch = fetch
        self._rolled_back = rolled_back
        self._outcome = Outcome()
        self._parameters = len(trainable(member.model))
        # Where the marks of this member's parameters are among the votes.
        numbers = [one.number for one in member.state.optimizer.held]
        self._marks = 3 * schedule.shards + torch.tensor(numbers, dtype=torch.int64)
        self._touched: list[bool] = []
        self._waited_s = 0.0
        self._shares = member.shares()
        self._tied = TiedSum(self._groups, member.held, self._state.optimizer.held)
        given = self._groups, self._state.optimizer.held, list(runner.buffers.values())
        self._feedback = member.feedback
        self._sum = DataParallelSum(*given)
        if self._feedback and member.compression:
            self._sum = CompressedSum(*given, self._feedback, member.compression)
        self._weights = WholeWeights(member)
        self._portions = portions(*(member.with_residuals() if self._feedback else (member.held, member.forms)))
        self._copies: list[Copy] = []
        self._news = list(self._state.part.lines)
        if snapshots.is_due(self._state.applied):
            self._take_snapshot()

    # --- a step ------------------------------------------------------------------------------------------------------

    def compute(self, step: int) -> None:
        with self._groups.world.guard():
            self._outcome = self._runner.train(self._tasks(step))

    def _tasks(self, step: int) -> list[Task]:
        occupied = self._schedule.occupied(step)
        first, end = self._seat.ranges[self._seat.rank]
        numbers = list(range(first, min(end, occupied)))
        tasks = [self._task(step, number) for number in numbers]
        if self._degrees.sharded > 1:  # its collectives require equally many passes on every member
            most = max(min(last, occupied) - low for low, last in self._seat.ranges)
            spare = numbers[0] if numbers else 0
            tasks += [self._task(step, spare, counts=False)] * (most - len(tasks))
        return tasks

    def _task(self, step: int, shard: int, counts: bool = True) -> Task:
        _, low, high = self._schedule.shard(step, shard)
        seed = shard_seed(self._job.seed, step, shard)
        return Task(shard, high - low, seed, partial(self._bring, partial(self._fetch, step, shard, shard + 1)), counts)

    def _bring(self, fetch: Callable[[], Any]) -> Any:
        with self._groups.world.outside():
            return fetch()

    def commit(self, step: int) -> StepResult:
        started = time.perf_counter()
        with self._groups.world.guard():
            self._touched = self._state.part.touched()
            gradients = self._state.part.gradients()
            self._tied.add(gradients)
            gradients = self._sum.add(gradients, self._schedule, self._seat.ranges, step)
            self._state.ready(step, gradients)
            votes = self._vote()
        decision = self._judge(step, votes)
        self.comm_s += time.perf_counter() - started + self._waited()
        for copying in self._copies:
            copying.finish_before_a_write()
        self._copies.clear()
        if not self._member.recipe.elementwise:
            seed_everything(mix(self._job.seed, 4, step, self._seat.rank) >> 1)
        self._state.apply(decision)
        self._runner.carries_random_state = len(self._groups.pipeline) > 1 and bool(votes[-1])
        if self._snapshots.is_due(self._state.applied) and self._state.applied < self._seat.steps:
            self._take_snapshot()
        return StepResult(decision.loss, decision.samples, decision.fingerprint)

    def _vote(self) -> torch.Tensor:
        """The vote, the last collective of a step: (loss, weight, samples) of every shard; then for each parameter how
        many members touched it; then the square of the gradient's norm; then whether any member drew random numbers."""
        shards = self._schedule.shards
        votes = torch.zeros(3 * shards + self._parameters + 2, dtype=torch.float64)
        votes[self._marks] = torch.tensor(self._touched, dtype=torch.float64)
        if self._groups.place.tensor == 0:
            for shard, row in self._outcome.rows.items():
                votes[3 * shard : 3 * shard + 3] = torch.tensor(row, dtype=torch.float64)
        if self._job.clip_norm is not None:
            votes[-2] = self._state.squares(self._shares)
        votes[-1] = float(self._outcome.drew)
        with self._groups.world.network():
            dist.all_reduce(votes)
        return votes

    def _judge(self, step: int, votes: torch.Tensor) -> CommitDecision:
        """Decide from the votes; the same on every member."""
        shards = self._schedule.shards
        rows = votes[: 3 * shards].view(-1, 3).numpy()
        untouched = (votes[3 * shards : -2] == 0).nonzero().flatten().tolist()
        told = judge(step, rows[:, _LOSS], rows[:, _WEIGHT], rows[:, _COUNT], rows.tobytes())
        weight = math.fsum(rows[:, _WEIGHT])
        factor = 1.0 / weight if weight else 0.0
        factor *= self._job.clip_factor(math.sqrt(float(votes[-2])) * factor)
        occupied, generation, now = self._schedule.occupied(step), self._seat.generation, CLOCK.now()
        return CommitDecision(
            step, told.loss, told.samples, told.fingerprint, generation, now, factor, occupied, untouched
        )

    def _waited(self) -> float:
        """Seconds of waiting for other stages since the last call."""
        before, self._waited_s = self._waited_s, math.fsum(self._runner.waited_s.values())
        return self._waited_s - before

    def _take_snapshot(self) -> None:
        self._snapshots.take(self._groups.world, self._state, self._member.held, self._member.forms)
        self._news += self._snapshots.news()

    # --- questions ---------------------------------------------------------------------------------------------------

    def steps_applied(self) -> int:
        return self._state.applied

    def taken_over(self) -> Takeover | None:
        return None

    def remembered(self, first: int) -> list[Applied]:
        return [one for one in self._state.history if one.step >= first]

    def note(self) -> tuple[int, bytes]:
        return self._state.note

    def keep_note(self, content: bytes) -> None:
        self._state.note = (self._state.applied, content)

    def portions(self) -> Sequence[MeshPortion]:
        return self._portions

    def copy_portion(self, applied: int, into: Segment) -> Copy:
        residuals = self._feedback.tensors(applied) if self._feedback else {}
        copying = copy_of(self._portions[self._seat.rank], self._state, residuals, into)
        self._copies.append(copying)
        return copying

    def measure(self, tasks: Sequence[Task], measure: Callable[[Task, Any, Any], None]) -> None:
        row, rows, count = self._degrees.row(self._seat.rank), self._degrees.rows, len(tasks)
        tasks = [replace(task, fetch=partial(self._bring, task.fetch)) for task in tasks]
        mine = list(tasks[row * count // rows : (row + 1) * count // rows])
        if self._degrees.sharded > 1 and tasks:
            most = max((r + 1) * count // rows - r * count // rows for r in range(rows))
            mine += [replace((mine or tasks)[0], counts=False)] * (most - len(mine))
        reports = self._groups.place.tensor == 0
        modules = [stage.module for stage in self._runner.stages.values()]
        self._state.restore_buffers()
        for module in modules:
            module.eval()
        try:
            with torch.no_grad(), self._groups.world.guard():
                self._runner.measure(mine, measure if reports else lambda task, output, target: None)
        finally:
            for module in modules:
                module.train()
            self._state.restore_buffers()

    def save_weights(self, path: Path) -> None:
        self._weights.save(path)

    def weights_sha256(self) -> str:
        return self._weights.sha256()

    def waits(self) -> Mapping[int, float]:
        return self._runner.waited_s

    def traffic(self) -> tuple[int, int]:
        return self._sum.traffic

    def helped(self) -> int:
        return 0

    def plan_lines(self) -> Sequence[str]:
        lines, self._news, self._sum.news = self._news + self._sum.news, [], []
        return lines

    def rolled_back(self) -> RolledBack | None:
        return self._rolled_back
