"""Inspects a step: its shards, its layers, and the values in them that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from distbelief.replaying.findings import MODEL, Count, Finding, in_state, layer_of, not_finite
from distbelief.replaying.forward import Passed, ShardWork, pass_through
from distbelief.shards import Range, shard_seed, split
from distbelief.strategies.dataparallel.replica import DataParallelReplica
from distbelief.strategies.flatmodel.layout import trainable
from distbelief.worker.loading import Loaded

Gradients = list[torch.Tensor | None]


@dataclass(frozen=True)
class ShardView:
    shard: int
    seed: int
    indices: tuple[int, ...]
    """Indices of the samples in the job's data, in the order of the batch."""
    loss: float | None = None
    """The mean over the shard's samples. None: an error came before the loss."""
    weight: float = 0.0
    gradient_norm: float | None = None
    """The norm of that mean's gradient."""
    error: Exception | None = None
    error_layer: str = ""

    @property
    def finite(self) -> bool:
        return all(value is not None and math.isfinite(value) for value in (self.loss, self.gradient_norm))


@dataclass(frozen=True)
class ParameterView:
    name: str
    gradient_norm: float | None
    """None: no shard gave the parameter a gradient."""
    count: Count


@dataclass(frozen=True)
class LayerView:
    """A module with trainable parameters of its own."""

    layer: str
    kind: str
    parameters: tuple[ParameterView, ...]

    @property
    def gradient_norm(self) -> float | None:
        norms = [one.gradient_norm for one in self.parameters if one.gradient_norm is not None]
        return math.hypot(*norms) if norms else None

    @property
    def count(self) -> Count:
        return sum((one.count for one in self.parameters), Count())


@dataclass(frozen=True)
class Inspection:
    step: int
    shards: tuple[ShardView, ...]
    layers: tuple[LayerView, ...]
    """Gradients over all inspected shards, before clipping."""
    findings: tuple[Finding, ...]
    """Findings in the state before the step, then shard by shard."""

    @property
    def gradient_norm(self) -> float | None:
        norms = [one.gradient_norm for one in self.layers if one.gradient_norm is not None]
        return math.hypot(*norms) if norms else None

    @property
    def loss(self) -> float | None:
        """The step's loss: over all shards, by their weights."""
        if any(one.loss is None for one in self.shards):
            return None
        weight = math.fsum(one.weight for one in self.shards)
        return math.fsum((one.loss or 0.0) * one.weight for one in self.shards) / weight if weight else 0.0

    @property
    def error(self) -> Exception | None:
        return next((one.error for one in self.shards if one.error), None)


@dataclass(frozen=True)
class Question:
    """The request: what to inspect."""

    step: int
    shard: int | None
    """None: all shards."""
    stop_at: int | None
    """The debugger stops before the forward pass of this shard."""
    on_purpose: Collection[str]
    """Buffers that are not finite by design."""


def inspect(loaded: Loaded, replica: DataParallelReplica, asked: Question) -> Inspection:
    """Inspect a step before it is executed. The replica's state is unchanged afterwards."""
    step = asked.step
    replica.synchronise()
    findings = in_state(replica.model, asked.on_purpose)
    shards: dict[int, ShardView] = {}
    weights: list[float] = []

    def compute(shard: int) -> Gradients:
        _, indices = loaded.feed.samples(step, shard, shard + 1)
        view = ShardView(shard, shard_seed(loaded.job.seed, step, shard), tuple(indices.tolist()))
        replica.synchronise()
        passed = _pass(loaded, replica, view, step, shard == asked.stop_at)
        findings.extend(passed.findings)
        weights.append(passed.weight)
        shards[shard] = _viewed(view, passed)
        return passed.gradients

    # The shard for the debugger comes first: an error in another shard could prevent it.
    order = (asked.shard, asked.shard + 1) if asked.shard is not None else (0, loaded.schedule.occupied(step))
    early = compute(asked.stop_at) if asked.stop_at is not None else None
    total = _summed(lambda v: early if early is not None and v == asked.stop_at else compute(v), order)
    replica.synchronise()
    layers = _layers(replica.model, total, math.fsum(weights))
    findings.sort(key=lambda one: -1 if one.shard is None else one.shard)
    return Inspection(step, tuple(shards[v] for v in sorted(shards)), layers, tuple(findings))


def _pass(loaded: Loaded, replica: DataParallelReplica, view: ShardView, step: int, debug: bool) -> Passed:
    try:
        batch, _ = loaded.watch.fetch(step, view.shard, view.shard + 1)
    except Exception as error:  # an exception of the data set's code, in a reader
        return Passed(None, 0.0, [None] * len(trainable(replica.model)), [], error)
    work = ShardWork(step, view.shard, view.seed, view.indices, batch)
    return pass_through(loaded.job, replica.model, work, debug)


def _viewed(view: ShardView, passed: Passed) -> ShardView:
    if passed.loss_sum is None:
        return replace(view, error=passed.error, error_layer=passed.error_layer)
    per = passed.weight or 1.0
    norm = math.hypot(*(_norm(gradient) for gradient in passed.gradients if gradient is not None), 0.0)
    return replace(view, loss=passed.loss_sum / per, weight=passed.weight, gradient_norm=norm / per)


def _summed(compute: Callable[[int], Gradients], shards: Range) -> Gradients:
    """Add gradients along the tree, as the step itself does."""
    if shards[1] - shards[0] == 1:
        return compute(shards[0])
    left, right = split(shards)
    one, other = _summed(compute, left), _summed(compute, right)
    return [b if a is None else a if b is None else a + b for a, b in zip(one, other, strict=True)]


def _layers(model: torch.nn.Module, gradients: Sequence[torch.Tensor | None], weight: float) -> tuple[LayerView, ...]:
    kinds = {name or MODEL: type(module).__name__ for name, module in model.named_modules()}
    views: dict[str, list[ParameterView]] = {}
    for (name, _), gradient in zip(trainable(model), gradients, strict=True):
        norm = None if gradient is None else _norm(gradient) / (weight or 1.0)
        count = Count() if gradient is None else not_finite(gradient)
        views.setdefault(layer_of(name), []).append(ParameterView(name, norm, count))
    return tuple(LayerView(layer, kinds[layer], tuple(parameters)) for layer, parameters in views.items())


def _norm(gradient: torch.Tensor) -> float:
    dense = gradient.coalesce().values() if gradient.is_sparse else gradient
    return float(torch.linalg.vector_norm(dense, dtype=torch.float64))
