"""The optimizers of key-value stores: torch's own, made from a name and numbers, since servers accept no code.

Every optimizer here treats each element alike, so a value that is cut over servers gets the bits of an uncut value.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace

from distbelief.errors import JobError
from distbelief.kv.messages import Number, OptimizerSpec
from distbelief.strategies.ps.tables.rowoptimizers import RowOptimizer

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "sgd": torch.optim.SGD,
}
_NOT_FOR_SERVERS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_OF_ROWS = frozenset({"lr", "eps", "betas", "initial_accumulator_value"})


def optimizer_spec(name: str, numbers: dict[str, Any]) -> OptimizerSpec:
    """The specification of an optimizer, checked by making one.

    >>> optimizer_spec("adam", {"lr": 0.1, "betas": [0.9, 0.99]})
    OptimizerSpec(name='adam', numbers={'lr': 0.1, 'betas': (0.9, 0.99)})
    >>> optimizer_spec("sgd", {"momentum": -1})
    Traceback (most recent call last):
    distbelief.errors.JobError: sgd cannot have momentum=-1: Invalid momentum value: -1.0
    """
    if name not in OPTIMIZERS:
        raise JobError(f"no optimizer of servers is called {name!r}", hint=f"one of {', '.join(sorted(OPTIMIZERS))}")
    given = ", ".join(f"{key}={value}" for key, value in numbers.items())
    plain: dict[str, Number] = {}
    for key, value in numbers.items():
        pair = isinstance(value, tuple | list) and all(isinstance(one, int | float) for one in value)
        if key in _NOT_FOR_SERVERS or not (pair or isinstance(value, int | float)):
            raise JobError(f"{name} on a server cannot have {key}={value!r}", hint="give numbers, or leave it out")
        plain[key] = tuple(float(one) for one in value) if pair else value if isinstance(value, bool) else float(value)
    spec = OptimizerSpec(name, plain)
    try:
        made(spec, torch.zeros(1))
    except (TypeError, ValueError, RuntimeError) as error:
        raise JobError(
            f"{name} cannot have {given}: {error}", hint=f"see the arguments of torch.optim.{OPTIMIZERS[name].__name__}"
        ) from error
    return spec


def made(spec: OptimizerSpec, values: torch.Tensor) -> torch.optim.Optimizer:
    """The optimizer of these values, which it changes in place."""
    make: Any = OPTIMIZERS[spec.name]
    optimizer: torch.optim.Optimizer = make([torch.nn.Parameter(values)], **spec.numbers)
    return optimizer


def differs_in_rate_only(one: OptimizerSpec | None, other: OptimizerSpec | None) -> bool:
    """Whether two specifications differ in `lr` alone: then the optimizer keeps its state."""
    if one is None or other is None:
        return False
    return replace(one, numbers={**one.numbers, "lr": 0.0}) == replace(other, numbers={**other.numbers, "lr": 0.0})


def row_optimizer(spec: OptimizerSpec | None) -> tuple[RowOptimizer, float]:
    """(the optimizer of a table's rows, a factor for its learning rate). Without a specification, pushes are added.

    >>> row_optimizer(OptimizerSpec("adagrad", {"lr": 0.1}))[0].name
    'adagrad'
    """
    if spec is None:
        return RowOptimizer("sgd", lr=1.0), -1.0
    unknown = sorted(spec.numbers.keys() - _OF_ROWS)
    if unknown:
        raise JobError(f"the optimizer of a table's rows has no {unknown[0]}", hint=f"{', '.join(sorted(_OF_ROWS))}")
    numbers: dict[str, Any] = {"lr": 1e-3 if spec.name == "adam" else 1e-2, **spec.numbers}
    if "initial_accumulator_value" in numbers:
        numbers["initial"] = numbers.pop("initial_accumulator_value")
    return RowOptimizer(spec.name, **numbers), 1.0
