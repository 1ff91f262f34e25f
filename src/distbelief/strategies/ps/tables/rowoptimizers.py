"""Optimizers of sparse tables: each row has its own state, and only rows that have a gradient change.

`step` works on the rows of one push, gathered: no row twice. Every operation is a separate, correctly rounded one of
numpy, so a row's bits depend on its own gradients only: not on the other rows of the push, on how the table is divided
among servers, on the number of threads or on the kind of processor. (torch's vectorised kernels fuse multiply and add,
except in the last few elements of an array.)

- sgd: value -= lr·g.
- adagrad: sum += g²; value -= lr·g/(√sum + eps). The values of torch.optim.Adagrad (to rounding).
- adam, "lazy": moments decay, and steps count, only when the row has a gradient. Where every row has one each time,
  this is torch.optim.SparseAdam (to rounding). Otherwise SparseAdam corrects the bias of a row's moments by the number
  of steps that the whole table took: a row first met late then moves by up to 3.2·lr (usual betas); here by lr.
  `decay` is AdamW's: value *= 1 - lr·decay first, also only when the row has a gradient.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import optim

from distbelief.errors import JobError

State = dict[str, NDArray[Any]]


class RowField(Struct, frozen=True):
    """One entry of a row's optimizer state: as wide as the row, or a single number."""

    name: str
    dtype: str = "float32"
    wide: bool = True


_FIELDS: dict[str, tuple[RowField, ...]] = {
    "sgd": (),
    "adagrad": (RowField("sum"),),
    "adam": (RowField("exp_avg"), RowField("exp_avg_sq"), RowField("step", "int64", wide=False)),
}
_EPS = {"sgd": 0.0, "adagrad": 1e-10, "adam": 1e-8}


class RowOptimizer(Struct, frozen=True):
    """An optimizer as data. `eps` None: torch's own default for it. `initial` is what Adagrad's sums begin with.

    >>> RowOptimizer("adagrad", lr=0.05).fields
    (RowField(name='sum', dtype='float32', wide=True),)
    >>> RowOptimizer("adam", lr=-1.0)
    Traceback (most recent call last):
    distbelief.errors.JobError: a table's optimizer has lr -1.0
    """

    name: str
    lr: float
    eps: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    initial: float = 0.0
    decay: float = 0.0
    late_eps: bool = False
    """eps is added when the moments' bias has been corrected, as Adam does; else before, as SparseAdam does."""

    def __post_init__(self) -> None:
        if self.name not in _FIELDS:
            raise JobError(
                f"no optimizer of sparse tables is called {self.name!r}", hint=f"one of {', '.join(sorted(_FIELDS))}"
            )
        for key, number in (("lr", self.lr), ("eps", self.eps), ("initial", self.initial), ("decay", self.decay)):
            if number is not None and not (math.isfinite(number) and number >= 0):
                raise JobError(f"a table's optimizer has {key} {number}", hint="a number of 0 or more")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise JobError(f"a table's optimizer has betas {self.betas}", hint="two numbers of 0 or more, below 1")

    @property
    def fields(self) -> tuple[RowField, ...]:
        """The state of every row."""
        return _FIELDS[self.name]

    def begin(self, field: RowField) -> float:
        """The start value of a field of a row's state."""
        return self.initial if self.name == "adagrad" else 0.0

    def step(self, values: NDArray[np.float32], state: State, gradients: NDArray[np.float32], factor: float) -> None:
        """Change values and state in place. `factor` times `lr` is the learning rate; gradients may be overwritten."""
        eps = np.float32(_EPS[self.name] if self.eps is None else self.eps)
        if self.name == "sgd":
            gradients *= np.float32(self.lr * factor)
        elif self.name == "adagrad":
            total = state["sum"]
            total += gradients * gradients
            divisor = np.sqrt(total)
            divisor += eps
            gradients /= divisor
            gradients *= np.float32(self.lr * factor)
        else:
            gradients = self._adam(state, gradients, eps, factor)
            if self.decay:
                values *= np.float32(1 - self.lr * factor * self.decay)
        values -= gradients

    def _adam(
        self, state: State, gradients: NDArray[np.float32], eps: np.float32, factor: float
    ) -> NDArray[np.float32]:
        """lr·√(1 - b₂ᵗ)/(1 - b₁ᵗ) · m/(√v + eps), with m += (1 - b₁)(g - m), v += (1 - b₂)(g² - v), and t the row's."""
        mean, square, steps = state["exp_avg"], state["exp_avg_sq"], state["step"]
        first, second = self.betas
        steps += 1
        mean += (gradients - mean) * np.float32(1 - first)
        square += (gradients * gradients - square) * np.float32(1 - second)
        correction = np.sqrt(_corrections(second, steps))
        rate = correction / _corrections(first, steps)
        rate *= self.lr * factor
        change: NDArray[np.float32] = np.sqrt(square)
        change += (eps * correction).astype(np.float32)[:, None] if self.late_eps else eps
        np.divide(mean, change, out=change)
        np.multiply(change, rate.astype(np.float32)[:, None], out=change)
        return change


def _corrections(beta: float, steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """1 - betaᵗ for every t."""
    table = _correction_table(beta, int(steps.max(initial=0)).bit_length())
    return table.take(steps, mode="clip")


@lru_cache(maxsize=64)
def _correction_table(beta: float, bits: int) -> NDArray[np.float64]:
    """1 - betaᵗ for t from 0 to 2^bits - 1, or until it is 1 and stays so.

    By repeated multiplication, because `pow` differs between processors in its last bit.
    """
    until_one = 2 + math.ceil(54 * math.log(2) / -math.log(beta)) if beta else 2
    powers = np.full(min(1 << bits, until_one), beta)
    powers[0] = 1.0
    return 1.0 - np.multiply.accumulate(powers)


def row_optimizer(table: str, factory: Any) -> RowOptimizer:
    """The row optimizer that stands for a torch optimizer.

    >>> row_optimizer("users", lambda parameters: torch.optim.Adagrad(parameters, lr=0.05)).name
    'adagrad'
    >>> row_optimizer("users", lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    Traceback (most recent call last):
    distbelief.errors.JobError: the rows of table 'users' cannot be trained by SGD with momentum=0.9
    """
    made: optim.Optimizer = factory([torch.nn.Parameter(torch.zeros(1, 1))])
    kind = type(made)
    group = next(group for group in made.param_groups if group["params"])
    wanted: dict[Any, tuple[str, dict[str, Any]]] = {
        optim.SGD: ("sgd", {"momentum": 0, "weight_decay": 0, "maximize": False}),
        optim.Adagrad: ("adagrad", {"lr_decay": 0, "weight_decay": 0, "maximize": False}),
        optim.Adam: ("adam", {"weight_decay": 0, "amsgrad": False, "maximize": False}),
        optim.AdamW: ("adam", {"amsgrad": False, "maximize": False}),
    }
    hint = (
        "SGD without momentum, Adagrad, Adam and AdamW work row by row: give the table one of its own, as in "
        "EmbeddingTable(…, optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.05))"
    )
    if kind not in wanted:
        raise JobError(f"the rows of table '{table}' cannot be trained by {kind.__name__}", hint=hint)
    name, must_be = wanted[kind]
    if odd := [key for key, value in must_be.items() if group[key] != value]:
        odd_is = f"{odd[0]}={group[odd[0]]}"
        raise JobError(f"the rows of table '{table}' cannot be trained by {kind.__name__} with {odd_is}", hint=hint)
    return RowOptimizer(
        name,
        float(group["lr"]),
        group.get("eps"),
        tuple(group.get("betas", (0.9, 0.999))),
        group.get("initial_accumulator_value", 0.0),
        group["weight_decay"] if kind is optim.AdamW else 0.0,
        late_eps=True,
    )
