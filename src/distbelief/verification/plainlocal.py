"""Trains a job as `local_sgd` does, in one plain PyTorch loop: the reference to which `distbelief verify` compares that
strategy.

Built on plain.py; of the strategies it uses the value with the settings only.

    for each round of H steps:
        for each replica that has samples:
            put parameters and buffers back to those of before the round
            for each step: add up the gradients of the replica's shards, clip them, run the replica's own optimizer and
            the functions of `after_update`
        difference = the mean over the replicas of (parameters before - parameters after)
        run the outer optimizer on the parameters of before, with that difference for a gradient, and the functions of
            `after_update`
        float buffers become their average over the replicas; integer buffers are those of the first replica

With compression each replica encodes its difference parameter by parameter, and keeps the encoding's error for its next
round. A replica does not send parameters that it did not touch.

If no step of any replica has a gradient for a parameter, the outer optimizer leaves it alone, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from distbelief.compression.codec import Codec
from distbelief.compression.methods import codec_of
from distbelief.errors import DistBeliefError
from distbelief.job import Job
from distbelief.shards import Range, Schedule
from distbelief.strategies.localsgd.strategy import LocalSGD
from distbelief.verification.plain import (
    Buffers,
    Fetch,
    ShardComputation,
    ShardSum,
    add_up,
    after_update,
    clip,
    make_optimizer,
    open_data,
    update,
)


def train_locally(job: Job, model: torch.nn.Module, how: LocalSGD, most_steps: int = 0) -> Iterator[float]:
    """Train a model that `make_model` has just made. Yields the loss of each step when its round is complete.

    >>> from distbelief.verification.plain import make_model
    >>> job = Job(
    ...     model=lambda: torch.nn.Linear(4, 2),
    ...     loss=torch.nn.functional.cross_entropy,
    ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    ...     data=(torch.eye(4), torch.tensor([0, 1, 0, 1])),
    ...     global_batch=4,
    ...     shards=2,
    ...     steps=20,
    ... )
    >>> losses = list(train_locally(job, make_model(job), LocalSGD(3)))
    >>> len(losses), losses[-1] < losses[0]
    (20, True)
    """
    schedule, fetch = open_data(job)
    steps = job.steps or max(1, math.ceil((job.epochs or 1) * schedule.steps_per_epoch))
    steps = min(steps, most_steps or steps)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    buffers = Buffers(model)
    tensors = [*(parameter.data for parameter in parameters), *buffers.floats, *buffers.integers]
    count, shards = how.replicas_of(job), schedule.shards
    groups = [(r * shards // count, (r + 1) * shards // count) for r in range(count)]
    replicas = [Replica(job, model, buffers, schedule, fetch, group) for group in groups]
    # torch's fused SGD differs from the definition of SGD for 16-bit numbers.
    fused = not any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in parameters)
    outer = torch.optim.SGD(parameters, **how.outer_options, fused=fused)
    for first in range(0, steps, how.steps):
        round_ = range(first, min(first + how.steps, steps))
        before = [tensor.clone() for tensor in tensors]
        ends = []
        for replica in replicas:
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
            if end := replica.train(round_):
                ends.append(end)
        after_update(job, model, apply(outer, parameters, before[: len(parameters)], ends, how.compression))
        mean_buffers(buffers, before[len(parameters) :], ends)
        for place in range(len(round_)):
            told = [end.told[place] for end in ends]
            weight = math.fsum(one for _, one in told)
            yield math.fsum(loss for loss, _ in told) / weight if weight else 0.0


@dataclass
class End:
    """The state of a replica at the end of a round."""

    parameters: list[torch.Tensor]
    touched: list[bool]
    """Per parameter: whether any step gave it a gradient."""
    owed: dict[int, torch.Tensor]
    """Parameter -> the part of the replica's differences that it has not sent yet."""
    floats: list[torch.Tensor]
    changed: list[bool]
    """Per float buffer: whether any step changed it."""
    integers: list[torch.Tensor]
    told: list[tuple[float, float]]
    """Per step: the summed loss and its divisor."""


class Replica:
    """One replica with its optimizer. All replicas share one model; each uses it for its part of a round."""

    def __init__(
        self, job: Job, model: torch.nn.Module, buffers: Buffers, schedule: Schedule, fetch: Fetch, group: Range
    ) -> None:
        self._job = job
        self._model = model
        self._buffers = buffers
        self._schedule = schedule
        self._fetch = fetch
        self._group = group
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._owed: dict[int, torch.Tensor] = {}
        self._optimizer = make_optimizer(job, self._parameters)
        self._rates = [float(group["lr"]) if "lr" in group else None for group in self._optimizer.param_groups]

    def train(self, steps: range) -> End | None:
        """Train one round. None: the replica has no samples in any of the steps."""
        if all(self._schedule.occupied(step) <= self._group[0] for step in steps):
            return None
        touched, changed = [False] * len(self._parameters), [False] * len(self._buffers.floats)
        told = [(0.0, 0.0)] * len(steps)
        for place, step in enumerate(steps):
            busy = min(self._group[1], self._schedule.occupied(step))
            if busy <= self._group[0]:
                continue
            total = self._step(step, (self._group[0], busy))
            told[place] = math.fsum(total.losses), math.fsum(total.weights)
            if told[place][1]:
                touched = [had or one is not None for had, one in zip(touched, total.gradients, strict=True)]
            changed = [was or now for was, now in zip(changed, total.changed, strict=True)]
        return End(
            [parameter.detach().clone() for parameter in self._parameters],
            touched,
            self._owed,
            [buffer.clone() for buffer in self._buffers.floats],
            changed,
            [buffer.clone() for buffer in self._buffers.integers],
            told,
        )

    def _step(self, step: int, shards: Range) -> ShardSum:
        job, buffers = self._job, self._buffers
        buffers.keep()
        compute = ShardComputation(job, self._model, self._parameters, buffers, self._fetch, step)
        total = add_up(lambda shard: compute(shards[0] + shard), (0, shards[1] - shards[0]))
        weight, loss_sum = math.fsum(total.weights), math.fsum(total.losses)
        if not math.isfinite(loss_sum):
            raise DistBeliefError(f"plain: the loss is {loss_sum} at step {step}; the step was not applied")
        for parameter, gradient in zip(self._parameters, total.gradients, strict=True):
            parameter.grad = None if gradient is None or weight == 0 else gradient * (1.0 / weight)
        clip(job, self._parameters)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            if rate is not None:
                group["lr"] = rate * job.rate_factor(step)
        after_update(job, self._model, update(self._optimizer, self._parameters))
        buffers.commit(total)
        return total


def apply(
    outer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], before: list[torch.Tensor], ends: list[End],
    compression: str = "",
) -> list[torch.nn.Parameter]:  # fmt: skip
    """Apply the outer step. Returns the parameters that it has updated."""
    codec = codec_of(compression) if compression else None
    for place, (parameter, then) in enumerate(zip(parameters, before, strict=True)):
        parameter.data.copy_(then)
        parameter.grad = None
        if any(end.touched[place] for end in ends):
            parameter.grad = add_tree([sent(end, place, then, codec) for end in ends]) * (1.0 / len(ends))
    return update(outer, parameters)


def sent(end: End, place: int, then: torch.Tensor, codec: Codec | None) -> torch.Tensor:
    """A replica's difference as the receiver decodes it."""
    difference = then - end.parameters[place]
    if codec is None or difference.dtype != torch.float32 or not difference.numel():
        return difference
    if not end.touched[place]:
        return torch.zeros_like(difference)
    vector = difference.reshape(-1)
    owed = end.owed.setdefault(place, torch.zeros_like(vector))
    message = codec.encode(vector + owed)
    arrived = codec.decode(message.header, message.frames)
    end.owed[place] = vector + owed - arrived
    return arrived.view_as(difference)


def mean_buffers(buffers: Buffers, before: list[torch.Tensor], ends: list[End]) -> None:
    """Set the buffers after a round. `before`: the buffers' values before the round, float buffers first."""
    for place, (buffer, then) in enumerate(zip(buffers.floats, before, strict=False)):
        # The average of equal numbers is not always that number, so unchanged buffers are restored.
        changed = any(end.changed[place] for end in ends)
        buffer.copy_(add_tree([end.floats[place] for end in ends]) / len(ends) if changed else then)
    for buffer, value in zip(buffers.integers, ends[0].integers, strict=True):
        buffer.copy_(value)


def add_tree(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum along the binary tree, cut at the largest power of two below the number of parts."""
    if len(parts) == 1:
        return parts[0]
    middle = 1 << (len(parts) - 1).bit_length() - 1
    return add_tree(parts[:middle]) + add_tree(parts[middle:])
