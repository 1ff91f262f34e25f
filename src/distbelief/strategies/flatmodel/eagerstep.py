"""Optimizers without torch's compiler. torch.optim imports it (`torch._dynamo`, more than a second, half of a worker's
launch) at the first optimizer and at the first step, only to say that it must leave them alone. A job that compiles
its model imports it itself, and then this module does nothing.

The same functions are called on the same tensors, so the bits are the same. Should a later torch look different inside,
nothing is found to be spared, and the compiler is imported as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

_COMPILER = "torch._dynamo"


def spare_the_compiler() -> None:
    """Let optimizers be made, saved and loaded without an import of the compiler. Once per process."""
    if _COMPILER in sys.modules:
        return
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        inner = getattr(getattr(Optimizer, name, None), "__wrapped__", None)
        if inner is not None and not hasattr(inner, "__dynamo_disable"):
            # Where torch keeps the function that it made by `torch._dynamo.disable` for the next call.
            setattr(inner, "__dynamo_disable", inner)


def eager_step(optimizer: Optimizer) -> Callable[[], Any]:
    """What `optimizer.step` does, for calling it time and again.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> weight.grad = torch.ones(1)
    >>> eager_step(torch.optim.SGD([weight], lr=0.25))()
    >>> weight.item()
    0.75
    """
    inner = getattr(type(optimizer).step, "__wrapped__", None)
    code = getattr(inner, "__code__", None)
    if code is None or code.co_name != "_use_grad" or _has_hooks(optimizer) or "step" in vars(optimizer):
        return optimizer.step
    plain: Callable[..., Any] = inner.__wrapped__  # type: ignore[union-attr]
    differentiable = bool(optimizer.defaults.get("differentiable", False))

    def step() -> None:
        with torch.set_grad_enabled(differentiable):
            plain(optimizer)

    return step


def _has_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody wants to be called before or after a step."""
    module = sys.modules[Optimizer.__module__]
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    everywhere = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    return any(getattr(optimizer, name, None) for name in names) or any(getattr(module, n, None) for n in everywhere)
