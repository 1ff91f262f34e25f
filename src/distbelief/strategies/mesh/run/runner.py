"""One member's part of a step: it runs its stages on the shards of its data group, in the order of the pipeline
schedule.

The random numbers of a shard are the ones that a single process draws: the state of the generator travels with the
shard from stage to stage, as long as any stage draws random numbers.

Each shard has its own copy of a stage's buffers, and the average over the shards is committed (`ShardBuffers`). A
shard's buffer updates (running statistics) must be visible to its own, possibly much later, backward pass and to no
other shard. So modules never get the committed tensors themselves while they train.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from distbelief.data.sources import seed_everything, split_batch
from distbelief.errors import JobError
from distbelief.job import Job
from distbelief.shards import mix
from distbelief.strategies.base import Task
from distbelief.strategies.flatmodel.compute import loss_sum
from distbelief.strategies.flatmodel.rules.stepwork import integers_differ
from distbelief.strategies.mesh.rules.schedules import (
    Action,
    ActionKind,
    PipelineSchedule,
    PipelineSeat,
    all_forward_all_backward,
    joined,
    one_forward_one_backward,
)
from distbelief.strategies.mesh.run.stagetransfer import StageTransfer

# --- buffers ---------------------------------------------------------------------------------------------------------


class ShardBuffers:
    """The buffers of one stage: committed tensors, a copy per shard, and the sum over the shards of a step."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._places = [
            (owner, key, buffer)
            for owner in module.modules()
            for key, buffer in owner._buffers.items()
            if buffer is not None
        ]
        tensors = {id(buffer): (owner, key, buffer) for owner, key, buffer in reversed(self._places)}
        first = [tensors[id(buffer)] for _, _, buffer in self._places]
        unique = list({id(buffer): (owner, key, buffer) for owner, key, buffer in first}.values())
        self._floats = [one for one in unique if one[2].is_floating_point()]
        self._integers = [one for one in unique if not one[2].is_floating_point()]
        self.sums = [torch.zeros_like(buffer) for _, _, buffer in self._floats]
        self.changed = [False] * len(self._floats)
        self._checksum: int | None = None
        self.keep()

    def keep(self) -> None:
        """Take over new values of the committed tensors."""
        self.restore()
        self._after = [buffer.clone() for _, _, buffer in self._integers]

    def begin(self) -> None:
        """Begin a step."""
        for total in self.sums:
            total.zero_()
        self.changed = [False] * len(self._floats)
        self._checksum = None

    def lend(self) -> None:
        """Give the module copies of the committed values, for one shard."""
        copies: dict[int, torch.Tensor] = {}
        for owner, key, buffer in self._places:
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.clone()
            owner._buffers[key] = copies[id(buffer)]

    def collect(self) -> None:
        """Add the values that a shard left, whether it has written to a buffer or replaced it."""
        for number, (owner, key, buffer) in enumerate(self._floats):
            left = _left(owner, key, buffer)
            self.sums[number] += left
            self.changed[number] = self.changed[number] or not torch.equal(left, buffer)
        if self._integers:
            found = [_left(*one) for one in self._integers]
            checksum = 0
            for left in found:
                checksum = zlib.crc32(left.contiguous().numpy().tobytes(), checksum)
            if self._checksum not in (None, checksum):
                raise integers_differ()
            self._checksum = checksum
            for kept, left in zip(self._after, found, strict=True):
                kept.copy_(left)

    def restore(self) -> None:
        """Give the module the committed tensors themselves."""
        for owner, key, buffer in self._places:
            owner._buffers[key] = buffer

    def commit(self, shards: int) -> None:
        """Commit the average. `sums` and `changed` are now those of all members over `shards` shards."""
        # The average of equal numbers is not always that number, so a buffer that no shard changed stays.
        for (_, _, buffer), total, changed in zip(self._floats, self.sums, self.changed, strict=True):
            if changed:
                buffer.copy_(total / shards)
        for (_, _, buffer), after in zip(self._integers, self._after, strict=True):
            buffer.copy_(after)
        self.restore()

    @property
    def after(self) -> list[torch.Tensor]:
        """The integer buffers after the step's shards."""
        return self._after


def _left(owner: torch.nn.Module, key: str, buffer: torch.Tensor) -> torch.Tensor:
    present = owner._buffers[key]
    if present is None or present.shape != buffer.shape:
        raise JobError(f"the model's buffer '{key}' changed its shape while training")
    return present.detach()


# --- stages ----------------------------------------------------------------------------------------------------------


class RunnableStage(Protocol):
    """A stage of the model (`cut/stages.py`), or the whole model."""

    @property
    def module(self) -> torch.nn.Module: ...

    @property
    def needs_batch(self) -> bool: ...

    def __call__(self, received: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any: ...


@dataclass(frozen=True)
class WholeModel:
    """The only stage of a model that is not cut."""

    module: torch.nn.Module
    needs_batch: bool = True

    def __call__(self, received: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.module(*args, **kwargs)


@dataclass
class _ShardPass:
    """A shard on its way through one stage."""

    inputs: list[torch.Tensor]
    """The received tensors that need a gradient."""
    outputs: list[torch.Tensor]
    """The sent tensors that get a gradient; on the last stage, the loss."""
    waiting: Any = None
    """The state between the two halves of a backward pass."""


@dataclass
class Outcome:
    """A member's results of a step."""

    rows: dict[int, tuple[float, float, int]] = field(default_factory=dict)
    """For each shard: the sum of the loss, its weight, samples. Only on the member with the last stage."""
    drew: bool = False
    """Whether one of this member's stages drew random numbers."""


class StageRunner:
    """Runs this member's stages. `split_backward`: whether a backward pass may come in two halves (zero bubble);
    `call_context`: the context for every call of a stage."""

    def __init__(
        self, job: Job, stages: Mapping[int, RunnableStage], pipeline: PipelineSeat, transfer: StageTransfer,
        split_backward: bool, call_context: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self.stages = stages
        self.buffers = {number: ShardBuffers(stage.module) for number, stage in stages.items()}
        self.carries_random_state = len(pipeline.members) > 1
        self._job = job
        self._pipeline = pipeline
        self._transfer = transfer
        self._split = split_backward
        self._call_context = call_context
        self._last = pipeline.stages - 1
        self._shard_passes: dict[tuple[int, int], _ShardPass] = {}
        self._local_activations: dict[tuple[int, int], list[Any]] = {}
        self._local_gradients: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._batches: dict[int, Any] = {}

    def train(self, tasks: Sequence[Task]) -> Outcome:
        """Forward and backward of every task; gradients are added to those of the parameters."""
        outcome = Outcome()
        for buffers in self.buffers.values():
            buffers.begin()
        actions = actions_of(self._pipeline.schedule, len(self._pipeline.members), self._pipeline.me, len(tasks))
        last = {one.stage: number for number, one in enumerate(actions) if one.kind in ("backward", "backward_input")}
        for number, action in enumerate(actions):
            self._look_ahead(actions[number + 1 : number + 3], tasks)
            self._keep_gathered(action.stage, number < last[action.stage])
            task = tasks[action.shard]
            if action.kind == "forward":
                self._forward(action, task, outcome)
            elif action.kind == "backward":
                self._backward(action)
            elif action.kind == "backward_input":
                self._backward_input(action)
            else:
                self._backward_weight(action)
        self._transfer.settle()
        return outcome

    def measure(self, tasks: Sequence[Task], measure: Callable[[Task, Any, Any], None]) -> None:
        """Forward only; `measure` is given (task, output, target) where the last stage is."""
        waited = dict.fromkeys(self._pipeline.members, 0.0) | self._transfer.waited_s
        actions = actions_of(self._pipeline.schedule, len(self._pipeline.members), self._pipeline.me, len(tasks))
        for action in actions:
            if action.kind == "forward":
                task = tasks[action.shard]
                values = self._values_for(action, task, training=False)
                self.buffers[action.stage].lend()
                self._seed(action.stage, task, None)
                with autocast(self._job):
                    output, target = self._call(action, task, values)
                if action.stage == self._last:
                    if task.counts:
                        measure(task, output, target)
                else:
                    self._pass_on(action, task, list(output), training=False)
        self._transfer.settle()
        self._transfer.waited_s.update(waited)  # only waiting in training steps counts

    def _keep_gathered(self, stage: int, keep: bool) -> None:
        """Keep the parameters that a sharded stage has outside of its blocks gathered until the last pass of the step:
        gathering them again for every pass would take time."""
        module = self.stages[stage].module
        if isinstance(module, FSDPModule):
            module.set_reshard_after_backward(not keep, recurse=False)

    # --- forward -----------------------------------------------------------------------------------------------------

    def _forward(self, action: Action, task: Task, outcome: Outcome) -> None:
        stage, buffers = action.stage, self.buffers[action.stage]
        values = self._values_for(action, task, training=True)
        state = values.pop() if self.carries_random_state and stage > 0 else None
        self._seed(stage, task, state)
        before = torch.get_rng_state() if self._pipeline.stages > 1 else None
        buffers.lend()
        with autocast(self._job):
            output, target = self._call(action, task, values)
            if stage == self._last:
                total, weight = loss_sum(self._job.loss(output, target), task.samples)
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            outcome.drew = True
        if task.counts:
            buffers.collect()
        inputs = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
        if stage == self._last:
            if task.counts:
                outcome.rows[task.number] = (total.item(), float(weight), task.samples)
            else:
                total = total * 0.0
            self._shard_passes[stage, action.shard] = _ShardPass(inputs, [total])
            return
        outputs = list(output)
        if self._split:  # the two halves detach outputs in place, which torch refuses for views
            outputs = [o.clone() if isinstance(o, torch.Tensor) and o._is_view() else o for o in outputs]
        wanted = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
        self._shard_passes[stage, action.shard] = _ShardPass(inputs, wanted)
        self._pass_on(action, task, outputs, training=True)

    def _values_for(self, action: Action, task: Task, training: bool) -> list[Any]:
        if action.stage == 0:
            return []
        handed = self._local_activations.pop((action.stage, action.shard), None)
        if handed is not None:
            return handed
        source = self._pipeline.rank_of(action.stage - 1)
        return self._transfer.receive(source, action.stage - 1, action.shard, self._kind(task, training))

    def _pass_on(self, action: Action, task: Task, outputs: list[Any], training: bool) -> None:
        """Send the outputs to the next stage, with the state of the generator."""
        values = [*outputs, torch.get_rng_state()] if training and self.carries_random_state else outputs
        if action.stage + 1 in self.stages:
            self._local_activations[action.stage + 1, action.shard] = [
                value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
                for value in values
            ]
        else:
            to = self._pipeline.rank_of(action.stage + 1)
            self._transfer.send(values, to, action.stage, action.shard, self._kind(task, training))

    def _kind(self, task: Task, training: bool) -> int:
        return task.samples * 4 + 2 * training + self.carries_random_state

    def _seed(self, stage: int, task: Task, state: torch.Tensor | None) -> None:
        # If no state travels along, no stage has drawn a random number so far. A stage that draws one now uses a
        # seed that depends on the shard.
        seed_everything(task.seed if stage == 0 or state is not None else mix(task.seed, stage) >> 1)
        if state is not None:
            torch.set_rng_state(state)

    def _call(self, action: Action, task: Task, values: list[Any]) -> tuple[Any, Any]:
        stage = self.stages[action.stage]
        args: tuple[Any, ...] = ()
        kwargs: Mapping[str, Any] = {}
        target = None
        if stage.needs_batch or action.stage == self._last:
            args, kwargs, target = split_batch(self._batch(action, task))
        with self._call_context():
            return stage(values, args, kwargs), target

    def _batch(self, action: Action, task: Task) -> Any:
        """The batch of a shard. A member with several stages fetches it once."""
        later = [s for s in self.stages if s > action.stage and (self.stages[s].needs_batch or s == self._last)]
        if action.shard not in self._batches:
            self._batches[action.shard] = task.fetch()[0]
        return self._batches[action.shard] if later else self._batches.pop(action.shard)

    def _look_ahead(self, actions: Sequence[Action], tasks: Sequence[Task]) -> None:
        """Post receives for the next passes, so that the values arrive while this pass is computed."""
        for action in actions:
            shard_pass = self._shard_passes.get((action.stage, action.shard))
            if action.kind in ("backward", "backward_input") and shard_pass and action.stage < self._last:
                if action.stage + 1 not in self.stages:
                    source = self._pipeline.rank_of(action.stage + 1)
                    self._transfer.expect_gradients(shard_pass.outputs, source, action.stage, action.shard)
            elif action.kind == "forward" and action.stage > 0 and action.stage - 1 not in self.stages:
                source = self._pipeline.rank_of(action.stage - 1)
                kind = self._kind(tasks[action.shard], True)
                self._transfer.expect(source, action.stage - 1, action.shard, kind)

    # --- backward ----------------------------------------------------------------------------------------------------

    def _gradients_for(self, action: Action, shard_pass: _ShardPass) -> list[torch.Tensor] | None:
        if action.stage == self._last:
            return None
        handed = self._local_gradients.pop((action.stage, action.shard), None)
        if handed is not None:
            return handed
        source = self._pipeline.rank_of(action.stage + 1)
        return self._transfer.receive_gradients(shard_pass.outputs, source, action.stage, action.shard)

    def _pass_back(self, action: Action, shard_pass: _ShardPass) -> None:
        if action.stage == 0:
            return
        gradients = [t.grad if t.grad is not None else torch.zeros_like(t) for t in shard_pass.inputs]
        if action.stage - 1 in self.stages:
            self._local_gradients[action.stage - 1, action.shard] = gradients
        else:
            to = self._pipeline.rank_of(action.stage - 1)
            self._transfer.send_gradients(gradients, to, action.stage - 1, action.shard)

    def _backward(self, action: Action) -> None:
        shard_pass = self._shard_passes.pop((action.stage, action.shard))
        gradients = self._gradients_for(action, shard_pass)
        torch.autograd.backward(shard_pass.outputs, gradients)
        self._pass_back(action, shard_pass)

    def _backward_input(self, action: Action) -> None:
        """The half that the stage before waits for; the parameters' gradients come later, when this member would be
        idle."""
        if not self._split:
            self._backward(action)
            return
        shard_pass = self._shard_passes[action.stage, action.shard]
        gradients = self._gradients_for(action, shard_pass)
        if not shard_pass.inputs:  # no stage waits: do all of it later
            shard_pass.waiting = gradients
            return
        weights = self.stages[action.stage].module.parameters()
        _, shard_pass.waiting = stage_backward_input(shard_pass.outputs, gradients, list(shard_pass.inputs), weights)
        self._pass_back(action, shard_pass)

    def _backward_weight(self, action: Action) -> None:
        if not self._split:
            return
        shard_pass = self._shard_passes.pop((action.stage, action.shard))
        if shard_pass.inputs:
            stage_backward_weight(self.stages[action.stage].module.parameters(), shard_pass.waiting)
        else:
            torch.autograd.backward(shard_pass.outputs, shard_pass.waiting)

    @property
    def waited_s(self) -> Mapping[int, float]:
        """Seconds of waiting, by the rank that this member waited for."""
        return self._transfer.waited_s


@contextmanager
def autocast(job: Job) -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=job.precision == "bf16"):
        yield


_KINDS: dict[str, ActionKind] = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


@lru_cache(maxsize=64)
def actions_of(schedule: PipelineSchedule, members: int, member: int, shards: int) -> tuple[Action, ...]:
    """The actions of a pipeline's member in a step, in order."""
    if members == 1 or schedule == "1f1b":
        return one_forward_one_backward(members, member, shards)
    if schedule == "gpipe":
        return all_forward_all_backward(member, shards)
    return _actions_of_torch(schedule, members, member, shards)


def _actions_of_torch(schedule: PipelineSchedule, members: int, member: int, shards: int) -> tuple[Action, ...]:
    """torch.distributed.pipelining computes the lists of two schedules. Its runtime is not used: it requires shards of
    equal size."""
    from torch.distributed.pipelining import schedules

    # The classes compute an order from a few numbers, but their constructors require stages with a process group.
    kind: Any = schedules.ScheduleZBVZeroBubble if schedule == "zbv" else schedules.ScheduleInterleaved1F1B
    maker = object.__new__(kind)
    rounds = max(1, shards // members)
    each = -(-shards // rounds)
    maker.n_local_stages, maker.pp_group_size, maker.num_stages = 2, members, 2 * members
    maker._n_microbatches, maker.microbatches_per_round = rounds * each, each
    found = maker._calculate_single_rank_operations(member)
    # The interleaved order requires equal rounds: leave out the shards that only fill up the last one.
    return joined(
        Action(one.stage_index, _KINDS[one.computation_type.value], one.microbatch_index)
        for one in found
        if one is not None and one.microbatch_index is not None and one.microbatch_index < shards
        and one.computation_type.value in _KINDS
    )  # fmt: skip
