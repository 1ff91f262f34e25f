"""Trains a job as `sandblaster` does, in one plain PyTorch loop: the reference to which `distbelief verify` compares
that strategy.

Built on plain.py. It shares with the strategy the value with the strategy's settings, and the arithmetic of L-BFGS
(strategies/sandblaster/rules/lbfgs.py), here on vectors in this process. An ordinary loop over all samples computes
loss and gradient, portion by portion, and adds them along a binary tree. The bits are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from distbelief.data.sources import as_source
from distbelief.job import Job
from distbelief.strategies.sandblaster.rules import lbfgs
from distbelief.strategies.sandblaster.strategy import Sandblaster
from distbelief.strategies.sandblaster.vectors import BLOCK, JoinedVectors, SlicedVectors
from distbelief.verification.plain import Buffers, ShardComputation, add_up, open_data


def train_by_search(job: Job, model: torch.nn.Module, how: Sandblaster, most_steps: int = 0) -> Iterator[float]:
    """Train a model that `make_model` has just made. Yields the loss after each iteration.

    >>> from distbelief.verification.plain import make_model
    >>> job = Job(
    ...     model=lambda: torch.nn.Linear(4, 2),
    ...     loss=torch.nn.functional.cross_entropy,
    ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    ...     data=(torch.eye(4), torch.tensor([0, 1, 1, 1])),
    ...     global_batch=4,
    ...     steps=20,
    ... )
    >>> losses = list(train_by_search(job, make_model(job), Sandblaster()))
    >>> len(losses), losses[-1] < 1e-6
    (20, True)
    """
    schedule, fetch = open_data(job, how.schedule_of(job, len(as_source(job.data, job.collate))))
    steps = job.steps or max(1, math.ceil(job.epochs or 1))
    settings = lbfgs.Settings(history_size=how.history, lr=how.lr)
    flat = FlatVectors(model)
    buffers = Buffers(model)
    buffers.keep()
    compute = ShardComputation(job, model, flat.parameters, buffers, fetch, 0)

    def evaluate(point: str, gradient: str) -> float:
        flat.read(point)
        total = add_up(compute, (0, schedule.shards))
        finite = all(map(math.isfinite, (*total.losses, *total.weights)))
        loss, weight = math.fsum(total.losses) if finite else math.nan, math.fsum(total.weights)
        flat.write(gradient, total.gradients, 1.0 / weight if weight else 0.0)
        return loss / weight if weight else 0.0

    flat.write("start", [parameter.detach() for parameter in flat.parameters], 1.0)
    state = lbfgs.begin(flat.vectors, evaluate, "start", settings)
    for _ in range(min(steps, most_steps or steps)):
        state = lbfgs.iterate(state, flat.vectors, evaluate, settings)
        flat.read(state.point)
        yield state.loss


class FlatVectors:
    """Vectors of the length of all parameters; each parameter starts at a multiple of `BLOCK` elements."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._places: list[slice] = []
        size = 0
        for parameter in self.parameters:
            self._places.append(slice(size, size + parameter.numel()))
            size += -(-parameter.numel() // BLOCK) * BLOCK
        self._where = (0, size)
        self._part = SlicedVectors(size, [self._where], self.parameters[0].dtype)
        self.vectors = JoinedVectors(size, [self._part])

    def read(self, name: str) -> None:
        """Copy a vector into the parameters."""
        for parameter, place in zip(self.parameters, self._places, strict=True):
            parameter.data.copy_(self._part.tensor(name, self._where)[place].view(parameter.shape))

    def write(self, name: str, parts: list[torch.Tensor | None] | list[torch.Tensor], factor: float) -> None:
        vector = self._part.tensor(name, self._where).zero_()
        for part, place in zip(parts, self._places, strict=True):
            if part is not None:
                torch.mul(part.reshape(-1), factor, out=vector[place])
