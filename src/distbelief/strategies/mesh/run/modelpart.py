"""Builds a member's part of the model: copied on meta, divided by tensor parallelism, cut into stages, sharded; then it
gets memory for exactly the tensors that this member holds.
"""

from __future__ import annotations

import copy
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

from distbelief.checkpoint.rules.boxes import Box, whole
from distbelief.checkpoint.sources import MODEL
from distbelief.job import Job
from distbelief.strategies.flatmodel.layout import trainable
from distbelief.strategies.flatmodel.namedtensors import tied
from distbelief.strategies.mesh.cut.cutting import Blueprint, make_blueprint
from distbelief.strategies.mesh.cut.stages import attach
from distbelief.strategies.mesh.rules.balance import UnitCost, partition
from distbelief.strategies.mesh.rules.balance import explain as explain_stages
from distbelief.strategies.mesh.rules.schedules import PipelineSeat
from distbelief.strategies.mesh.run.groups import MeshGroups
from distbelief.strategies.mesh.run.runner import RunnableStage, WholeModel
from distbelief.strategies.mesh.tensor.apply import apply_plan, held_box, whole_masks
from distbelief.strategies.mesh.tensor.plan import explain as explain_tensor
from distbelief.strategies.mesh.tensor.plan import plan

# --- FSDP2 for a stage, with our own collectives ------------------------------------------------------------------
# `fully_shard` divides every parameter among the members of the sharded dimension; a block of layers is gathered when
# it is needed and freed afterwards. torch's defaults do not fit gloo: gloo's reduce-scatter takes, measured, several
# times the memory of a block and as much time as an all-reduce. And the messages are long: memory that is allocated
# and freed for each message is either cleared by the system every time, or leaves holes that the next message does
# not fit into. So gathers and sums go through one scratch buffer that is never freed.

_SMALLEST_BLOCK = 1 / 64  # of the model's parameters: a smaller block does not pay for a collective of its own
_SMALLEST_MAPPING_BYTES = 1 << 20

Network = Callable[[], AbstractContextManager[None]]
"""The context for all waiting: see `TorchGroup.network`."""


class ScratchBuffer:
    """One piece of memory for message after message: as long as the longest message so far, and never freed."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns the memory. The caller before must have no more use for it."""
        size_bytes = count * dtype.itemsize
        if self._memory.numel() < size_bytes:
            self._memory = mapped(size_bytes, torch.uint8)
        return self._memory[:size_bytes].view(dtype)


class ScratchGather(AllGather):
    """All-gather into the scratch buffer."""

    def __init__(self, scratch: ScratchBuffer, network: Network) -> None:
        self._scratch = scratch
        self._network = network

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._scratch.take(_count(size), dtype)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """`input_tensor` is this member's piece of `output_tensor`."""
        with self._network():
            _exchange(group, lambda _: input_tensor, output_tensor.chunk(group.size()).__getitem__)


class ScratchReduceScatter(ReduceScatter):
    """Reduce-scatter: member k gets the sum of all members' pieces k, added in the order of the members."""

    def __init__(self, scratch: ScratchBuffer, network: Network) -> None:
        self._scratch = scratch
        self._network = network
        self._has_input = False

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the pieces, which are not needed afterwards; then memory for the sum, which stays until the end of
        the step."""
        if not self._has_input:
            self._has_input = True
            return self._scratch.take(_count(size), dtype)
        return mapped(_count(size), dtype)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: object,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        self._has_input = False
        if output_tensor.untyped_storage().data_ptr() == input_tensor.untyped_storage().data_ptr():
            raise RuntimeError("torch asks for memory in another order than this was written for")
        me, pieces = group.rank(), input_tensor.chunk(group.size())
        arrived = [piece if rank == me else torch.empty_like(piece) for rank, piece in enumerate(pieces)]
        with self._network():
            _exchange(group, pieces.__getitem__, arrived.__getitem__)
        torch.add(arrived[0], arrived[1], out=output_tensor)
        for piece in arrived[2:]:
            output_tensor += piece


def mapped(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory outside of the heap if it is long, so that memory kept for a while leaves no holes in the heap."""
    size_bytes = count * dtype.itemsize
    if size_bytes < _SMALLEST_MAPPING_BYTES:
        return torch.empty(count, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=dtype)


def _count(size: Sequence[int | torch.SymInt]) -> int:
    return math.prod(int(length) for length in size)


def _exchange(
    group: dist.ProcessGroup, give: Callable[[int], torch.Tensor], take: Callable[[int], torch.Tensor]
) -> None:
    """Exchange with all other members at once. Each member begins with the next one, or all would turn to the same
    member."""
    me, size = group.rank(), group.size()
    works = [dist.irecv(take((me - k) % size), group=group, group_src=(me - k) % size) for k in range(1, size)]
    works += [dist.isend(give((me + k) % size), group=group, group_dst=(me + k) % size) for k in range(1, size)]
    for work in works:
        if work is not None:
            work.wait()


def shard_stage(
    module: torch.nn.Module, blocks: Sequence[torch.nn.Module], groups: MeshGroups, reached: set[int]
) -> None:
    mesh, scratch = groups.mesh("sharded"), ScratchBuffer()
    for number, block in enumerate(blocks):
        # The last block is needed again at once, for its backward pass.
        fully_shard(block, mesh=mesh, reshard_after_forward=number + 1 < len(blocks))
    fully_shard(module, mesh=mesh)
    for wrapped in module.modules():
        if isinstance(wrapped, FSDPModule):
            wrapped.set_gradient_divide_factor(1.0)  # shards' gradients are sums; the whole batch's weight divides them
            wrapped.set_force_sum_reduction_for_comms(True)
            # If only some shards use a parameter, the others add zeros; else members would add up different sets.
            wrapped.set_reduce_scatter_unused_params(True, recurse=False)
            wrapped.set_custom_all_gather(ScratchGather(scratch, groups.world.network))
            wrapped.set_custom_reduce_scatter(ScratchReduceScatter(scratch, groups.world.network))
            # By default torch gathers the next block early. With gloo that gains nothing and takes memory.
            wrapped.set_modules_to_backward_prefetch([wrapped])
            for group in wrapped._get_fsdp_state()._fsdp_param_groups:
                _note_reached(group, reached)


def _note_reached(group: Any, reached: set[int]) -> None:
    """Note which parameters got a gradient from this member's shards. The zeros do not count: the optimizer must leave
    untouched parameters alone."""
    post_backward = group.post_backward

    def noting(*unused: Any) -> None:
        for one in group.fsdp_params:
            if hasattr(one, "_unsharded_param") and one.unsharded_param.grad is not None:
                reached.add(id(one.sharded_param))
        post_backward(*unused)

    group.post_backward = noting


def gathered_blocks(module: torch.nn.Module, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yields the elements of the model's lists and sequences of modules: each is gathered when needed and freed
    afterwards."""
    total = sum(p.numel() for p in module.parameters())
    present = {id(one) for one in module.modules()}
    users: dict[int, int] = {}
    for one in module.modules():
        for parameter in one._parameters.values():
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    taken: set[int] = set()
    for container in model.modules():
        if isinstance(container, torch.nn.ModuleList | torch.nn.Sequential) and id(container) not in taken:
            for element in container:
                parameters = list(element.parameters())
                shared = any(users.get(id(p), 0) > 1 for p in parameters)  # a module outside of the block uses it too
                large = sum(p.numel() for p in parameters) >= total * _SMALLEST_BLOCK
                if id(element) in present and id(element) not in taken and large and not shared:
                    taken.update(id(one) for one in element.modules())
                    yield element


CallContext = Callable[[], AbstractContextManager[None]]
"""Makes the context in which every call of a stage must run."""

Example = tuple[tuple[object, ...], Mapping[str, object]]
"""Inputs of the model (args, kwargs), on meta."""


@dataclass(frozen=True)
class HeldParameter:
    """A trainable parameter as this member holds it."""

    name: str
    number: int
    """Its index among the model's trainable parameters."""
    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    box: Box
    value: torch.nn.Parameter
    """This member's piece. It shares memory with the module's own parameter."""


@dataclass(frozen=True)
class ModelPart:
    """The part of the model that one member holds and runs."""

    stages: Mapping[int, RunnableStage]
    held: Sequence[HeldParameter]
    """The trainable parameters."""
    others: Mapping[str, tuple[Box, torch.Tensor]]
    """The frozen parameters and buffers: for each `model/NAME` the box and the memory."""
    sources: Sequence[torch.nn.Parameter]
    """The modules' own parameters, in the order of `held`: the backward pass leaves gradients there."""
    lines: Sequence[str]
    """How the model is divided, as text for people."""
    call_context: CallContext
    """The context for every call of a stage."""
    reached: set[int] | None = None
    """The ids of the `sources` that a shard gave a gradient; None: every source that has a gradient at all."""

    def tensors(self) -> dict[str, tuple[Box, torch.Tensor]]:
        """All tensors of the model that this member has."""
        mine = {f"{MODEL}{one.name}": (one.box, one.value.detach()) for one in self.held}
        return {**mine, **self.others}

    def touched(self) -> list[bool]:
        """For each parameter, whether this member's shards gave it a gradient. Call it before `gradients`, which clears
        that."""
        if self.reached is None:
            return [parameter.grad is not None for parameter in self.sources]
        found = [id(parameter) in self.reached for parameter in self.sources]
        self.reached.clear()
        return found

    def gradients(self) -> list[torch.Tensor | None]:
        """Take the gradients that the backward passes left, piece by piece, and clear them."""
        found: list[torch.Tensor | None] = []
        for parameter in self.sources:
            gradient, parameter.grad = parameter.grad, None
            if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
                if gradient.placements != parameter.placements:  # torch leaves some gradients whole, or not summed
                    gradient = gradient.redistribute(placements=parameter.placements)
                gradient = gradient._local_tensor
            found.append(gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient)
        return found


def build_part(
    model: torch.nn.Module, job: Job, groups: MeshGroups, pipeline: PipelineSeat,
    example: Callable[[], Example], costs: Callable[[Blueprint], Sequence[UnitCost]],
) -> ModelPart:  # fmt: skip
    """`model` is on meta and stays unchanged. `costs` gives the same costs of the model's units on all members."""
    degrees = groups.degrees
    numbers = {name: number for number, (name, _) in enumerate(trainable(model))}
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    first_name = tied(model)
    model = copy.deepcopy(model)
    lines: list[str] = []
    call_context: CallContext = nullcontext
    if degrees.tensor > 1:
        divided = plan(model, degrees.tensor, *example(), job.tensor_plan)
        lines += explain_tensor(divided, model)
        masks = apply_plan(model, divided, groups.mesh("tensor"))
        if masks.sites:  # the context looks at every call of torch, which takes time: only where needed
            call_context = partial(whole_masks, masks)
    reached: set[int] = set()
    stages: dict[int, RunnableStage] = {0: WholeModel(model)}
    has_modules = True
    if degrees.pipeline > 1:
        with call_context():
            blueprint = make_blueprint(model, *example(), split=job.split, at_least=pipeline.stages)
            found = costs(blueprint)
        has_modules = blueprint.way == "torch.fx"  # a stage made by torch.export calls no modules
        ranges = partition(found, pipeline.stages)
        lines += explain_stages(found, ranges, [unit.name for unit in blueprint.units])
        if len(pipeline.mine) > 1:
            members = range(len(pipeline.members))
            lines += [f"member {m + 1} of a pipeline has the stages {pipeline.shown_stages(m)}" for m in members]
        stages = {number: blueprint.stage(*ranges[number]) for number in pipeline.mine}
        if 0 in stages:
            attach(stages[0].module, model, _unused(model, blueprint.stage(0, len(blueprint.units)).module))
    for stage in stages.values():
        if degrees.sharded > 1:
            gathered = list(gathered_blocks(stage.module, model)) if has_modules else []
            shard_stage(stage.module, gathered, groups, reached)
            lines.append(
                f"every parameter is divided by {degrees.sharded}; members gather "
                + (f"{len(gathered)} blocks one at a time, and the rest" if gathered else "the whole part")
                + " when they need it"
            )
        stage.module.to_empty(device="cpu")
        stage.module.train()
    _tie_again([stage.module for stage in stages.values()], first_name)
    held: dict[str, tuple[HeldParameter, torch.nn.Parameter]] = {}
    others: dict[str, tuple[Box, torch.Tensor]] = {}
    for stage in stages.values():
        for any_name, parameter in stage.module.named_parameters():
            name = first_name.get(any_name, any_name)
            box, memory = held_box(parameter), _memory(parameter)
            if name not in numbers:
                others[f"{MODEL}{name}"] = (box, memory)
            elif name not in held:
                value = torch.nn.Parameter(memory)
                held[name] = (HeldParameter(name, numbers[name], shapes[name], box, value), parameter)
        for any_name, buffer in stage.module.named_buffers():
            name = first_name.get(any_name, any_name)
            others[f"{MODEL}{name}"] = (whole(buffer.shape), buffer)
    mine, sources = [one for one, _ in held.values()], [parameter for _, parameter in held.values()]
    return ModelPart(stages, mine, others, sources, lines, call_context, reached if degrees.sharded > 1 else None)


def _unused(model: torch.nn.Module, used: torch.nn.Module) -> list[str]:
    """Names of tensors that no stage uses. They are part of the state, so the first stage keeps them."""
    there = {id(tensor) for tensor in (*used.parameters(), *used.buffers())}
    every = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in every if id(tensor) not in there]


def _memory(parameter: torch.nn.Parameter) -> torch.Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()


def _tie_again(modules: Sequence[torch.nn.Module], first_name: Mapping[str, str]) -> None:
    """Tie shared tensors again: giving memory to modules one by one makes two of a tensor with two names or in two
    stages."""
    parameters: dict[str, torch.nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    for module in modules:
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            owner, _, key = name.rpartition(".")
            module.get_submodule(owner)._parameters[key] = parameters.setdefault(first_name.get(name, name), parameter)
        for name, buffer in list(module.named_buffers(remove_duplicate=False)):
            owner, _, key = name.rpartition(".")
            module.get_submodule(owner)._buffers[key] = buffers.setdefault(first_name.get(name, name), buffer)
