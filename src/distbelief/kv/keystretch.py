"""What one slice has of one key: a stretch of a tensor with its optimizer, or some rows of a table.

The same pushes in the same order give the same bits. Synchronous pushes wait until those of all workers are there, and
are added in the order of the workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from msgspec import Struct

from distbelief.kv.keyoptimizer import differs_in_rate_only, made, row_optimizer
from distbelief.kv.messages import Dense, Form, OptimizerSpec, Rows
from distbelief.kv.tensorbytes import dtype_of
from distbelief.strategies.flatmodel.eagerstep import eager_step
from distbelief.strategies.ps.tables.rowinit import RowInit, TableForm
from distbelief.strategies.ps.tables.store import Table

T = TypeVar("T")


@dataclass
class Rounds(Generic[T]):
    """Pushes of rounds that are not complete."""

    done: int = 0
    waiting: dict[int, dict[int, T]] = field(default_factory=dict)
    """Round -> rank -> what it pushed."""

    def add(self, number: int, rank: int, workers: int, push: T) -> list[list[T]]:
        """The rounds that are complete now, each in the order of the ranks. The first push of a rank counts."""
        if number < self.done or not 0 <= rank < workers:
            return []
        self.waiting.setdefault(number, {}).setdefault(rank, push)
        complete = []
        while len(self.waiting.get(self.done, ())) >= workers:
            pushes = self.waiting.pop(self.done)
            complete.append([pushes[one] for one in sorted(pushes)])
            self.done += 1
        return complete


class Part(Struct, frozen=True):
    """What a copy of a stretch needs beside its tensors."""

    form: Form
    first: int
    end: int
    attempt: int
    rounds: int
    waiting: list[tuple[int, int]]
    """(round, rank) of the pushes that wait; their tensors come last."""
    names: list[str]
    """Of the tensors before them."""


class DenseStretch:
    def __init__(self, form: Dense, first: int, end: int, attempt: int, values: torch.Tensor, segment: str) -> None:
        """`values`: the memory, with whatever is in it."""
        self.form, self.first, self.end, self.attempt = form, first, end, attempt
        self.values = values
        self.segment = segment
        self.rounds: Rounds[torch.Tensor] = Rounds()
        self._spec: OptimizerSpec | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._step: Callable[[], Any] = lambda: None

    def optimize(self, spec: OptimizerSpec | None) -> None:
        """From now on with this one."""
        if self._optimizer is not None and spec is not None and differs_in_rate_only(self._spec, spec):
            defaults: dict[str, Any] = made(spec, torch.zeros(1)).defaults
            self._optimizer.param_groups[0]["lr"] = defaults["lr"]
        else:
            self._optimizer = made(spec, self.values) if spec else None
            if self._optimizer is not None:
                self._step = eager_step(self._optimizer)
        self._spec = spec

    def push(self, gradient: torch.Tensor) -> None:
        if self._optimizer is None:
            self.values.add_(gradient)
        else:
            self._update(self._optimizer, gradient)

    def push_round(self, number: int, rank: int, workers: int, gradient: torch.Tensor) -> None:
        """Without an optimizer the sum of a round takes the value's place."""
        for pushes in self.rounds.add(number, rank, workers, gradient.clone()):
            total = pushes[0]
            for one in pushes[1:]:
                total.add_(one)
            if self._optimizer is None:
                self.values.copy_(total)
            else:
                self._update(self._optimizer, total)

    def _update(self, optimizer: torch.optim.Optimizer, gradient: torch.Tensor) -> None:
        parameter = optimizer.param_groups[0]["params"][0]
        parameter.grad = gradient
        self._step()
        parameter.grad = None

    def part(self) -> tuple[Part, list[torch.Tensor]]:
        state: dict[str, torch.Tensor] = {}
        if self._optimizer is not None:
            entries = self._optimizer.state.get(self._optimizer.param_groups[0]["params"][0], {})
            state = {name: one for name, one in entries.items() if isinstance(one, torch.Tensor)}
        waiting = [(number, rank) for number, pushes in self.rounds.waiting.items() for rank in pushes]
        about = Part(self.form, self.first, self.end, self.attempt, self.rounds.done, waiting, ["", *state])
        pushes = [self.rounds.waiting[number][rank] for number, rank in waiting]
        return about, [self.values, *state.values(), *pushes]

    def load(self, about: Part, tensors: list[torch.Tensor], spec: OptimizerSpec | None) -> None:
        self.values.copy_(tensors[0])
        self.optimize(spec)
        named = dict(zip(about.names[1:], tensors[1 : len(about.names)], strict=True))
        if self._optimizer is not None and named:
            self._optimizer.state[self._optimizer.param_groups[0]["params"][0]] = named
        self.rounds = Rounds(about.rounds)
        for (number, rank), push in zip(about.waiting, tensors[len(about.names) :], strict=True):
            self.rounds.waiting.setdefault(number, {})[rank] = push

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.form.dtype)


Push = tuple[torch.Tensor, torch.Tensor]
"""Rows, and a gradient for each."""


class TablePart:
    def __init__(self, key: str, form: Rows, attempt: int) -> None:
        self.form, self.attempt = form, attempt
        optimizer, self._factor = row_optimizer(form.optimizer)
        declared = TableForm(key, form.rows, form.width, RowInit(form.init, form.scale), form.seed)
        self.table = Table(declared, optimizer)
        self.rounds: Rounds[Push] = Rounds()

    def fits(self, rows: torch.Tensor) -> bool:
        return not rows.numel() or (int(rows.min()) >= 0 and int(rows.max()) < self.form.rows)

    def push(self, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        if rows.numel():
            self.table.push(rows, gradients, self._factor)

    def push_round(self, number: int, rank: int, workers: int, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        for pushes in self.rounds.add(number, rank, workers, (rows.clone(), gradients.clone())):
            self.push(torch.cat([one for one, _ in pushes]), torch.cat([one for _, one in pushes]))

    def pull(self, rows: torch.Tensor) -> np.ndarray:
        return self.table.pull(rows).numpy()

    def part(self) -> tuple[Part, list[torch.Tensor]]:
        state = self.table.state()
        waiting = [(number, rank) for number, pushes in self.rounds.waiting.items() for rank in pushes]
        about = Part(self.form, 0, 0, self.attempt, self.rounds.done, waiting, list(state))
        pushes = [part for number, rank in waiting for part in self.rounds.waiting[number][rank]]
        return about, [*state.values(), *pushes]

    def load(self, about: Part, tensors: list[torch.Tensor]) -> None:
        self.table.load(dict(zip(about.names, tensors[: len(about.names)], strict=True)))
        self.rounds = Rounds(about.rounds)
        rest = tensors[len(about.names) :]
        for at, (number, rank) in enumerate(about.waiting):
            self.rounds.waiting.setdefault(number, {})[rank] = (rest[2 * at], rest[2 * at + 1])
