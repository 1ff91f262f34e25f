"""Measures what each unit of a model costs: one unit at a time, on placeholder weights, never the whole model at once.

A unit runs as a stage of its own, forward and backward, on the values that the unit before it gave for a real batch.
Its weights and buffers are placeholders of the right shapes (`dryrun.py`).
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from distbelief.strategies.mesh.cut.cutting import Blueprint
from distbelief.strategies.mesh.cut.dryrun import call, in_mode, placeholder_weights, with_placeholders
from distbelief.strategies.mesh.cut.stages import Stage
from distbelief.strategies.mesh.rules.balance import UnitCost

RUNS = 3
"""Timed runs per unit, after one warm-up run. The median over all units of the same kind is used."""


def measure(
    blueprint: Blueprint, batch_args: tuple[Any, ...], batch_kwargs: Mapping[str, Any], device: torch.device | str
) -> list[UnitCost]:
    """Measure every unit: seconds of forward and backward, bytes of parameters and of tensors kept for backward.

    The model, its gradients and the states of the random generators stay unchanged.
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
            with in_mode(stage.module, training=True), with_placeholders(stage.module, device):
                kind = _kind(stage, received)
                times, size, received = _measure_unit(stage, received, args, kwargs, device)
            seconds[kind] += times
            found.append((kind, size))
    return [UnitCost(statistics.median(seconds[kind]), size) for kind, size in found]


def _kind(stage: Stage, received: Sequence[Any]) -> Any:
    """Units with an equal kind take the same time: the same layers of the same shapes on the same values."""
    layers = tuple(type(module) for module in stage.module.modules())
    tensors = (*stage.module.parameters(), *stage.module.buffers(), *received)
    shapes = tuple((tuple(t.shape), t.dtype) for t in tensors if isinstance(t, torch.Tensor))
    return layers, shapes, stage.module.operations


def _measure_unit(
    stage: Stage, received: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> tuple[list[float], int, tuple[Any, ...]]:
    """Returns the seconds of each run, the bytes, and the values that the unit sends."""

    def forward(weights: dict[str, torch.Tensor], inputs: Sequence[Any]) -> Any:
        return call(stage.module, weights, (tuple(inputs), args, kwargs), {})

    weights = placeholder_weights(stage.module, device, lambda tried: forward(tried, _fresh(received)))
    seconds, kept, output = [], 0, None
    for run in range(RUNS + 1):
        inputs = _fresh(received)
        _wait(device)
        begin = time.perf_counter()
        with _kept_for_backward(weights) as storages:
            output = forward(weights, inputs)
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


def _backward(output: Any) -> None:
    reached = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if reached:
        torch.autograd.backward(reached, [torch.ones_like(leaf) for leaf in reached])


def _fresh(received: Sequence[Any]) -> list[Any]:
    """Copies of the values as a stage receives them: without history, but needing a gradient."""

    def fresh(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().clone().requires_grad_(value.is_floating_point())

    return [fresh(value) for value in received]


@contextmanager
def _kept_for_backward(weights: Mapping[str, torch.Tensor]) -> Iterator[dict[int, int]]:
    """Yields, for each storage that autograd keeps inside the block, its bytes. Weights do not count."""
    own = {weight.untyped_storage().data_ptr() for weight in weights.values()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
