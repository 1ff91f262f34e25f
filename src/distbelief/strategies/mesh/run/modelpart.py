"""Builds a member's part of the model: copied on meta, divided by tensor parallelism, cut into stages, sharded; then it
gets memory for exactly the tensors that this member holds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
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
from distbelief.strategies.mesh.run.sharding import gathered_blocks, shard_stage
from distbelief.strategies.mesh.tensor.apply import apply_plan, held_box, whole_masks
from distbelief.strategies.mesh.tensor.plan import explain as explain_tensor
from distbelief.strategies.mesh.tensor.plan import plan

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
    """What one member holds of the model, and runs."""

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
