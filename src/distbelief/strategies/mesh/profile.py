"""What each unit of a model costs, measured: one unit at a time, on throw-away weights, never the whole model at once.

A unit is run as a stage of its own, forward and backward, on the values that the unit before it gave for a real batch.
Its weights are random and have the right shapes; so have its buffers. Layers that tensor parallelism has divided are
measured with the part that this member holds and without any communication; where a unit does not run so (a divided
vocabulary is only whole with its communication), with whole layers.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from distbelief.strategies.mesh.balance import UnitCost
from distbelief.strategies.mesh.cutting import Blueprint, Stage

RUNS = 3
"""Timed runs per unit, after one to warm up; the median over all units of the same kind counts."""


def measure(
    blueprint: Blueprint, batch_args: tuple[Any, ...], batch_kwargs: Mapping[str, Any], device: torch.device | str
) -> list[UnitCost]:
    """Seconds of forward and backward, and bytes of parameters and of what is kept for backward, of every unit.

    Neither the model, nor its gradients, nor the state of the random generators is changed.
    """
    device = torch.device(device)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), (batch_args, dict(batch_kwargs)))
    accelerators = [device] if device.type == "cuda" else []
    seconds: dict[Any, list[float]] = defaultdict(
        list
    )  # kind of unit -> of all its runs: blocks are alike, noise is not
    found: list[tuple[Any, int]] = []
    received: tuple[Any, ...] = ()
    with torch.random.fork_rng(devices=accelerators), torch.enable_grad():
        for number in range(len(blueprint.units)):
            stage = blueprint.stage(number, number + 1)
            with _training(stage.module), _without_hooks(stage.module):
                kind = _kind(stage, received)
                times, size, received = _measure_unit(stage, received, args, kwargs, device)
            seconds[kind] += times
            found.append((kind, size))
    return [UnitCost(statistics.median(seconds[kind]), size) for kind, size in found]


def _kind(stage: Stage, received: Sequence[Any]) -> Any:
    """Units that are equal in this take the same time: the same layers of the same shapes on the same values."""
    layers = tuple(type(module) for module in stage.module.modules())
    tensors = (*stage.module.parameters(), *stage.module.buffers(), *received)
    shapes = tuple((tuple(t.shape), t.dtype) for t in tensors if isinstance(t, torch.Tensor))
    return layers, shapes, stage.module.operations


def _measure_unit(
    stage: Stage, received: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> tuple[list[float], int, tuple[Any, ...]]:
    """Seconds of each run, bytes, and what it sends."""
    divided = any(isinstance(parameter, DTensor) for parameter in stage.module.parameters())
    weights = _stand_ins(stage.module, device, local=True)
    if divided:
        try:
            _forward(stage, weights, _fresh(received), args, kwargs)
        except (RuntimeError, IndexError):
            weights = _stand_ins(stage.module, device, local=False)
    seconds, kept, output = [], 0, None
    for run in range(RUNS + 1):
        inputs = _fresh(received)
        _wait(device)
        begin = time.perf_counter()
        with _kept_for_backward(weights) as storages:
            output = _forward(stage, weights, inputs, args, kwargs)
        kept = sum(storages.values())
        _backward(output)
        _wait(device)
        if run:
            seconds.append(time.perf_counter() - begin)
        for weight in weights.values():
            weight.grad = None
    parameters = sum(weights[name].nbytes for name, _ in stage.module.named_parameters())
    sent = tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in pytree.tree_leaves(output))
    return seconds, parameters + kept, sent


def _forward(
    stage: Stage,
    weights: dict[str, torch.Tensor],
    received: Sequence[Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    return torch.func.functional_call(stage.module, weights, (tuple(received), args, kwargs), tie_weights=True)


def _backward(output: Any) -> None:
    reached = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if reached:
        torch.autograd.backward(reached, [torch.ones_like(leaf) for leaf in reached])


def _fresh(received: Sequence[Any]) -> list[Any]:
    """The values as a stage gets them: of no history, but wanting a gradient."""

    def fresh(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().clone().requires_grad_(value.is_floating_point())

    return [fresh(value) for value in received]


def _stand_ins(module: torch.nn.Module, device: torch.device, local: bool) -> dict[str, torch.Tensor]:
    """Random weights that keep values at an ordinary size, so that no time goes into tiny or infinite numbers."""
    generator = torch.Generator(device).manual_seed(0)
    made: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        shape = parameter._local_tensor.shape if local and isinstance(parameter, DTensor) else parameter.shape
        value = torch.ones(shape, dtype=parameter.dtype, device=device)
        if parameter.ndim > 1 and value.is_floating_point():
            value.normal_(0.0, 1.0 / math.sqrt(max(1, value[0].numel())), generator=generator)
        made[name] = value.requires_grad_(parameter.requires_grad)
    for name, buffer in module.named_buffers():
        ones = buffer.is_floating_point() or buffer.dtype is torch.bool  # integers are indices as a rule: 0 is one
        made[name] = torch.full(buffer.shape, int(ones), dtype=buffer.dtype, device=device)
    return made


@contextmanager
def _kept_for_backward(weights: Mapping[str, torch.Tensor]) -> Iterator[dict[int, int]]:
    """Storage -> bytes of what autograd keeps meanwhile, weights apart."""
    own = {weight.untyped_storage().data_ptr() for weight in weights.values()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


@contextmanager
def _training(module: torch.nn.Module) -> Iterator[None]:
    before = [(one, one.training) for one in module.modules()]
    try:
        module.train()
        yield
    finally:
        for one, mode in before:
            one.training = mode


@contextmanager
def _without_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Tensor parallelism communicates in hooks; one member alone can only measure what is between."""
    before = [(one, one._forward_hooks, one._forward_pre_hooks) for one in module.modules()]
    try:
        for one, _, _ in before:
            if any(isinstance(parameter, DTensor) for parameter in one.parameters(recurse=True)):
                one._forward_hooks, one._forward_pre_hooks = type(one._forward_hooks)(), type(one._forward_pre_hooks)()
        yield
    finally:
        for one, hooks, pre_hooks in before:
            one._forward_hooks, one._forward_pre_hooks = hooks, pre_hooks


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
