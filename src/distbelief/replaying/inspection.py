"""Inspects a step: its shards, its layers, and the values in them that are not finite."""

from __future__ import annotations

import bdb
import contextlib
import math
import pdb
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from distbelief.data.sources import seed_everything, split_batch
from distbelief.job import Job
from distbelief.replaying.findings import (
    BATCH,
    LOSS,
    MODEL,
    Count,
    Finding,
    bad_samples,
    in_state,
    layer_of,
    not_finite,
)
from distbelief.replaying.tracing import Trace
from distbelief.shards import Range, shard_seed, split
from distbelief.strategies.dataparallel.replica import DataParallelReplica
from distbelief.strategies.flatmodel.compute import loss_sum, move
from distbelief.strategies.flatmodel.layout import trainable
from distbelief.worker.loading import Loaded

# --- one shard, computed once more --------------------------------------------------------------------------------
# With hooks, under the debugger if asked, and without a slot. The shard gets the same samples, seed and committed
# buffers as in training, so it gives the same numbers. The replica, which uses the same model, is not changed.

_NOT_STEPPED_INTO = [
    *("torch.nn.modules.module", "torch._*", "torch.compiler*", "torch.jit*", "torch.utils*", "torch.autograd*"),
    *("distbelief.replaying.tracing", "distbelief.replaying.findings"),
]
"""The stack frames between a module's call and its own forward."""


@dataclass(frozen=True)
class ShardWork:
    step: int
    shard: int
    seed: int
    indices: Sequence[int]
    batch: Any


@dataclass(frozen=True)
class Passed:
    """The result of one shard."""

    loss_sum: float | None
    """None: an error came before the loss."""
    weight: float
    gradients: list[torch.Tensor | None]
    """Gradients of the summed loss, per trainable parameter."""
    findings: list[Finding]
    error: Exception | None = None
    error_layer: str = ""
    """The module in which the error was raised; empty outside of all modules."""


def pass_through(job: Job, model: torch.nn.Module, work: ShardWork, debug: bool) -> Passed:
    """Run forward and backward of a shard. The model's buffers must be the committed ones; this function changes
    them."""
    device = next(model.parameters()).device
    batch = move(work.batch, device)
    found = _in_batch(batch, work)
    seed_everything(work.seed)
    # torch.compile would compile the hooks in, and the debugger could not step through the model.
    uncompiled = torch.compiler.set_stance("force_eager")
    with uncompiled, Trace(model, work.shard, work.indices) as trace, _collected(model) as gradients:
        try:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=job.precision == "bf16"):
                value = forward(job, model, batch, work.step, work.shard, work.indices, debug)
                total, told = loss_sum(value, len(work.indices))
                weight = float(told)
            trace.watch_backward(total)
            total.backward()  # type: ignore[no-untyped-call]
        except bdb.BdbQuit:
            raise
        except Exception as error:
            return Passed(None, 0.0, gradients, found + trace.outputs, error, trace.inside)
    found += trace.outputs
    if count := not_finite((total, torch.tensor(weight))):
        found.append(Finding("loss", LOSS, "", work.shard, count, origin=not found))
    elif trace.gradient:  # otherwise the loss is the cause and the gradient only a consequence
        found.append(trace.gradient)
    return Passed(total.item(), weight, gradients, found)


def forward(
    job: Job, model: torch.nn.Module, batch: Any, step: int, shard: int, indices: Sequence[int], debug: bool
) -> Any:
    """Compute the loss. The debugger shows this function's arguments, and `args`, `kwargs` and `target`."""
    args, kwargs, target = split_batch(batch)
    if debug:
        pdb.Pdb(skip=_NOT_STEPPED_INTO).set_trace()
    output = model(*args, **kwargs)
    return job.loss(output, target)


def _in_batch(batch: Any, work: ShardWork) -> list[Finding]:
    found = []
    for path, leaf in torch.utils._pytree.tree_leaves_with_path(batch):
        if count := not_finite(leaf):
            name, samples = torch.utils._pytree.keystr(path), bad_samples(leaf, work.indices)
            found.append(Finding("batch", BATCH, name, work.shard, count, origin=True, samples=samples))
    return found


@contextlib.contextmanager
def _collected(model: torch.nn.Module) -> Iterator[list[torch.Tensor | None]]:
    """Collects the gradients of trainable parameters during the block. The replica's own hooks remove gradients at the
    end of the backward pass, so these hooks read them earlier."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found: list[torch.Tensor | None] = [None] * len(parameters)

    def arrived(index: int, gradient: torch.Tensor) -> None:
        before = found[index]
        found[index] = gradient.detach() if before is None else before + gradient.detach()

    handles = [p.register_hook(partial(arrived, index)) for index, p in enumerate(parameters)]  # type: ignore[no-untyped-call]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


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
