"""A job trained by `local_sgd` in one plain PyTorch loop: what `distbelief verify` holds that strategy against.

Like plain.py, of which it is made: nothing of the strategies is used but the value that says what to do.

    for each round of H steps:
        for each replica that has samples:
            put parameters and buffers back to those of before the round
            for each step: add up the gradients of the replica's shards, clip them, run the replica's own optimizer
        difference = the mean over the replicas of (parameters before - parameters after)
        run the outer optimizer on the parameters of before, with that difference for a gradient
        float buffers become their average over the replicas; integer buffers are those of the first replica

With compression each replica sends its difference encoded, parameter by parameter, and keeps what that lost for its
next round. What it did not touch it does not send.

A parameter that had no gradient in any step of any replica is left alone, by the outer optimizer too.
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
    clip,
    make_optimizer,
    open_data,
    update,
)


def train_locally(job: Job, model: torch.nn.Module, how: LocalSGD, most_steps: int = 0) -> Iterator[float]:
    """Train the model, which is fresh from `make_model`. Gives the loss of each step, when its round is over.

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
    # torch's fused SGD gives other numbers for 16 bits than SGD is defined to give.
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
        apply(outer, parameters, before[: len(parameters)], ends, how.compression)
        mean_buffers(buffers, before[len(parameters) :], ends)
        for place in range(len(round_)):
            told = [end.told[place] for end in ends]
            weight = math.fsum(one for _, one in told)
            yield math.fsum(loss for loss, _ in told) / weight if weight else 0.0


@dataclass
class End:
    """What a replica has come to."""

    parameters: list[torch.Tensor]
    touched: list[bool]
    """Per parameter: whether any step gave it a gradient."""
    owed: dict[int, torch.Tensor]
    """Parameter -> what the replica has not sent of its differences yet."""
    floats: list[torch.Tensor]
    changed: list[bool]
    """Per float buffer: whether any step changed it."""
    integers: list[torch.Tensor]
    told: list[tuple[float, float]]
    """Per step: the sum of the loss, and what it is to be divided by."""


class Replica:
    """One replica, with its optimizer. The model is lent to it for a round."""

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
        """None: it has no samples in any of the steps."""
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
                group["lr"] = rate * (job.schedule(step) if job.schedule else 1.0)
        update(self._optimizer, self._parameters)
        buffers.commit(total)
        return total


def apply(
    outer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], before: list[torch.Tensor], ends: list[End],
    compression: str = "",
) -> None:  # fmt: skip
    """The outer step."""
    codec = codec_of(compression) if compression else None
    for place, (parameter, then) in enumerate(zip(parameters, before, strict=True)):
        parameter.data.copy_(then)
        parameter.grad = None
        if any(end.touched[place] for end in ends):
            parameter.grad = add_tree([sent(end, place, then, codec) for end in ends]) * (1.0 / len(ends))
    update(outer, parameters)


def sent(end: End, place: int, then: torch.Tensor, codec: Codec | None) -> torch.Tensor:
    """A replica's difference, as it arrives."""
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
    """`before`: the float buffers first."""
    for place, (buffer, then) in enumerate(zip(buffers.floats, before, strict=False)):
        # The average of equal numbers is not always that number: what nobody changed is left alone.
        changed = any(end.changed[place] for end in ends)
        buffer.copy_(add_tree([end.floats[place] for end in ends]) / len(ends) if changed else then)
    for buffer, value in zip(buffers.integers, ends[0].integers, strict=True):
        buffer.copy_(value)


def add_tree(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum, cut at the largest power of two below the number of parts."""
    if len(parts) == 1:
        return parts[0]
    middle = 1 << (len(parts) - 1).bit_length() - 1
    return add_tree(parts[:middle]) + add_tree(parts[middle:])
