"""Trains a job in one plain PyTorch loop: the reference to which `distbelief verify` compares the strategies.

Read this file to see what a step is. The loop imports no code of workers or transports, and two functions of the
strategies: `multiply_as_asked` (the library for linear layers) and `settle` (the form of embedding tables). From the
rest of the system it takes what the job fixes (the samples of a shard, the seeds), and how a batch is made and split.

    for each step:
        for each shard that has samples:
            put the buffers back to their values of before the step; seed with (seed, step, shard)
            forward, loss as a sum over the samples (or as the job gives it), backward
        add gradients and float buffers of the shards along a binary tree
        divide the gradients by the weight of the whole batch, clip them, run the optimizer
        apply the functions of `after_update` to the parameters that the optimizer has updated
        float buffers become their average over the shards; integer buffers must be the same after every shard

The bits are those of `allreduce`, with two exceptions. The norm for clipping is summed per parameter here and per tile
of the flat layout there, both in float64; the factor is then rounded to the type of the gradient, so a difference
appears once in about 10^8 steps. And a custom optimizer that draws random numbers, or in which one parameter influences
another, runs on groups of whole parameters there and on all parameters here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from distbelief.data.rules.order import positions_to_samples
from distbelief.data.sources import InMemory, as_source, seed_everything, split_batch
from distbelief.errors import DistBeliefError, JobError
from distbelief.job import Job
from distbelief.shards import Range, Schedule, sample_seed, shard_seed, split
from distbelief.strategies.flatmodel.onednn import multiply_as_asked
from distbelief.strategies.tables.embedding import settle

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)

Fetch = Callable[[int, int], tuple[Any, int]]
"""(step, shard) -> (batch, number of samples)."""


@dataclass
class ShardSum:
    """The results of one shard, or the sum over several shards."""

    gradients: list[torch.Tensor | None]
    """Per trainable parameter; None where no shard has a gradient."""
    floats: list[torch.Tensor]
    """The float buffers after the shard, or their sums."""
    changed: list[bool]
    """Per float buffer: whether a shard changed it."""
    integers: list[torch.Tensor]
    losses: list[float]
    """Per shard: the summed loss."""
    weights: list[float]
    """Per shard: the divisor of the summed loss."""


def train_plainly(job: Job, model: torch.nn.Module, most_steps: int = 0) -> Iterator[float]:
    """Train a model that `make_model` has just made. Yields the loss of each step after its update.

    >>> job = Job(
    ...     model=lambda: torch.nn.Linear(4, 2),
    ...     loss=torch.nn.functional.cross_entropy,
    ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    ...     data=(torch.eye(4), torch.tensor([0, 1, 0, 1])),
    ...     global_batch=4,
    ...     steps=20,
    ... )
    >>> losses = list(train_plainly(job, make_model(job)))
    >>> len(losses), losses[-1] < losses[0]
    (20, True)
    """
    schedule, fetch = open_data(job)
    steps = job.steps or max(1, math.ceil((job.epochs or 1) * schedule.steps_per_epoch))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(job, parameters)
    rates = [float(group["lr"]) if "lr" in group else None for group in optimizer.param_groups]
    buffers = Buffers(model)
    for step in range(min(steps, most_steps or steps)):
        buffers.keep()
        compute = ShardComputation(job, model, parameters, buffers, fetch, step)
        total = add_up(compute, (0, schedule.occupied(step)))
        weight, loss_sum = math.fsum(total.weights), math.fsum(total.losses)
        if not math.isfinite(loss_sum):
            raise DistBeliefError(f"plain: the loss is {loss_sum} at step {step}; the step was not applied")
        for parameter, gradient in zip(parameters, total.gradients, strict=True):
            # A batch of weight 0 gives no gradient to any parameter.
            parameter.grad = None if gradient is None or weight == 0 else gradient * (1.0 / weight)
        clip(job, parameters)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate * job.rate_factor(step)
        after_update(job, model, update(optimizer, parameters))
        buffers.commit(total)
        yield loss_sum / weight if weight else 0.0


def make_model(job: Job) -> torch.nn.Module:
    """Make the model with its initial weights."""
    seed_everything(job.seed)
    model = job.model if isinstance(job.model, torch.nn.Module) else job.model()
    settle(model)
    multiply_as_asked(job, model)
    for parameter in model.parameters():
        # In row-major order, also if the job asked for channels_last, because the strategies store them so.
        parameter.data = parameter.detach().reshape(-1).clone().view(parameter.shape)
    return model.train()


def nudge(model: torch.nn.Module) -> None:
    """Move every parameter to the next number above or below it: the smallest effect of rounding."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.rand(parameter.shape, generator=generator) < 0.5
            away = torch.where(up, torch.inf, -torch.inf).to(parameter.dtype)
            parameter.copy_(torch.nextafter(parameter, away))


def open_data(job: Job, other: Schedule | None = None) -> tuple[Schedule, Fetch]:
    """The schedule and the data of a job. `other`: a schedule to use instead of the job's."""
    source = as_source(job.data, job.collate)
    schedule = other or Schedule(len(source), job.global_batch, job.resolved_shards, job.drop_last)

    def fetch(step: int, shard: int) -> tuple[Any, int]:
        epoch, first, end = schedule.shard(step, shard)
        samples = positions_to_samples(np.arange(first, end), len(source), job.seed, epoch, job.shuffle)
        if isinstance(source, InMemory):
            return source.fetch(samples), len(samples)
        parts = []
        for sample in samples.tolist():
            seed_everything(sample_seed(job.seed, epoch, sample))
            parts.append(source.dataset[sample])
        return source.collate(parts), len(samples)

    return schedule, fetch


def make_optimizer(job: Job, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Make the job's optimizer, in torch's fused implementation where one exists and the job asks for no other: torch's
    implementations differ in the last bits, and strategies use the fused one."""
    made = job.optimizer(parameters)
    asked_otherwise = any(
        group.get("fused") is False or group.get("foreach") or group.get("differentiable")
        for group in made.param_groups
    )
    if type(made) not in FUSED or asked_otherwise:
        return made
    kind: Any = type(made)
    accepted = inspect.signature(kind).parameters
    defaults = {name: value for name, value in made.defaults.items() if name in accepted}
    fused: torch.optim.Optimizer = kind(
        [{**group, "fused": True} for group in made.param_groups], **{**defaults, "fused": True}
    )
    return fused


class Buffers:
    """A model's buffers and their values before the step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._places = [
            (module, key, buffer)
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.floats = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self.integers = [buffer for buffer in model.buffers() if not buffer.is_floating_point()]
        self.keep()

    def keep(self) -> None:
        self.before = [buffer.clone() for buffer in self.floats]
        self._integers_before = [buffer.clone() for buffer in self.integers]

    def restore(self) -> None:
        for buffer, value in zip(self.floats + self.integers, self.before + self._integers_before, strict=True):
            buffer.copy_(value)

    def gather(self) -> None:
        """Copy values back if a module has replaced a buffer by a new tensor, and restore the original tensor."""
        for module, key, buffer in self._places:
            present = module._buffers[key]
            if present is not buffer and present is not None:
                buffer.copy_(present.detach())
                module._buffers[key] = buffer

    def commit(self, total: ShardSum) -> None:
        shards = len(total.losses)
        for buffer, before, value, changed in zip(self.floats, self.before, total.floats, total.changed, strict=True):
            # The average of equal numbers is not always that number, so unchanged buffers are restored.
            buffer.copy_(value / shards if changed else before)
        for buffer, value in zip(self.integers, total.integers, strict=True):
            buffer.copy_(value)


@dataclass
class ShardComputation:
    """Forward and backward of one shard of a step."""

    job: Job
    model: torch.nn.Module
    parameters: list[torch.nn.Parameter]
    buffers: Buffers
    fetch: Fetch
    step: int

    def __call__(self, shard: int) -> ShardSum:
        batch, samples = self.fetch(self.step, shard)
        self.buffers.restore()
        for parameter in self.parameters:
            parameter.grad = None
        seed_everything(shard_seed(self.job.seed, self.step, shard))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.job.precision == "bf16"):
            args, kwargs, target = split_batch(batch)
            result = self.job.loss(self.model(*args, **kwargs), target)
            loss, weight = result if isinstance(result, tuple) else (result * samples, samples)
        loss.backward()  # type: ignore[no-untyped-call]
        self.buffers.gather()
        floats = [buffer.clone() for buffer in self.buffers.floats]
        return ShardSum(
            gradients=[dense(parameter.grad) for parameter in self.parameters],
            floats=floats,
            changed=[not torch.equal(now, then) for now, then in zip(floats, self.buffers.before, strict=True)],
            integers=[buffer.clone() for buffer in self.buffers.integers],
            losses=[loss.item()],
            weights=[float(weight)],
        )


def dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.coalesce().to_dense() if gradient is not None and gradient.is_sparse else gradient


def add_up(compute: Callable[[int], ShardSum], shards: Range) -> ShardSum:
    """The sum over a range of shards: the sum of the first half plus the sum of the second, where the first half has
    the largest power of two below the whole: ((0 + 1) + (2 + 3)) + 4 for five. Shards are computed on the way, so that
    few gradients are in memory at once."""
    if shards[1] - shards[0] == 1:
        return compute(shards[0])
    left, right = split(shards)
    return add(add_up(compute, left), add_up(compute, right))


def add(left: ShardSum, right: ShardSum) -> ShardSum:
    if not all(map(torch.equal, left.integers, right.integers)):
        raise JobError("plain: an integer buffer of the model has other values after one shard than after another")
    return ShardSum(
        gradients=[add_gradients(a, b) for a, b in zip(left.gradients, right.gradients, strict=True)],
        floats=[a + b for a, b in zip(left.floats, right.floats, strict=True)],
        changed=[a or b for a, b in zip(left.changed, right.changed, strict=True)],
        integers=left.integers,
        losses=left.losses + right.losses,
        weights=left.weights + right.weights,
    )


def add_gradients(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    """Add gradients; a missing gradient counts as zeros if the other one exists."""
    if left is None or right is None:
        some = left if right is None else right
        return None if some is None else some + torch.zeros_like(some)
    return left + right


def clip(job: Job, parameters: list[torch.nn.Parameter]) -> None:
    """Scale all gradients by one factor if their norm is above the job's limit."""
    if job.clip_norm is None:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squares = [float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2 for gradient in gradients]
    factor = job.clip_factor(math.sqrt(math.fsum(squares)))
    for gradient in gradients:
        if factor < 1.0:
            gradient.mul_(factor)


def update(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """One step for the parameters with a gradient; returns the parameters that the optimizer has updated. Parameters
    with their first gradient are updated in a separate call: torch's fused SGD needs a first step for all of its
    parameters, or for none."""
    given = [parameter for parameter in parameters if parameter.grad is not None]
    new = [parameter for parameter in given if not optimizer.state.get(parameter)]
    gradients = [parameter.grad for parameter in new]
    if new and len(new) < len(given):
        for parameter in new:
            parameter.grad = None
        optimizer.step()
        for parameter in given:
            parameter.grad = None
        for parameter, gradient in zip(new, gradients, strict=True):
            parameter.grad = gradient
    optimizer.step()
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [parameter for parameter in given if id(parameter) in optimized]


def after_update(job: Job, model: torch.nn.Module, updated: list[torch.nn.Parameter]) -> None:
    """Apply the job's functions to the parameters that were updated. A tied parameter has several names, and each
    function is applied to it once."""
    for pattern, function in job.after_update.items():
        named = model.named_parameters(remove_duplicate=False)
        matched = {id(parameter) for name, parameter in named if fnmatchcase(name, pattern)}
        for parameter in updated:
            if id(parameter) in matched:
                value = parameter.detach()
                with torch.no_grad():
                    result = function(value)
                    parameter.copy_((result if isinstance(result, torch.Tensor) else value).clone())
