"""Linear layers that multiply with oneDNN, which torch's convolutions use too, instead of with torch's BLAS.

torch's BLAS is Intel's, which does not use the widest instructions of other vendors' processors: oneDNN is about
twice as fast there (docs/matmul.md). It adds in another order, so the last bits differ from torch's; a job opts in with
`Job.matmul`. The library is chosen by shapes and types alone, so the weights do not depend on the cluster either.

Unusual cases (autocast, a compiler, functional transforms, second derivatives) are left to torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distbelief.errors import JobError
from distbelief.job import Job

WORTHWHILE = 1 << 20
"""Multiplications; below it, oneDNN's overhead costs more than the product."""
SMALL = 1 << 12
"""Elements of a weight; few batches are large enough to pay for a smaller one."""


def available() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def use_onednn(model: nn.Module) -> None:
    """Make the larger linear layers of a model multiply with oneDNN, in training and evaluation.

    >>> model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 2))
    >>> use_onednn(model)
    >>> [type(layer).__name__ for layer in model]
    ['OneDnnLinear', 'Linear']
    """
    if not available():
        raise JobError("this build of torch has no oneDNN", hint="leave `matmul` out of the job")
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= SMALL:
            module.__class__ = OneDnnLinear


def multiply_as_asked(job: Job, model: nn.Module) -> None:
    """Set the layers as the job requests; also resets them, because another job may have trained this model object."""
    for module in model.modules():
        if type(module) is OneDnnLinear:
            module.__class__ = nn.Linear  # type: ignore[assignment]
    if job.matmul == "onednn":
        use_onednn(model)


class OneDnnLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch names it
        if not _is_ordinary(input, self.weight):
            return super().forward(input)
        rows = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
        out: torch.Tensor = _Products.apply(rows.contiguous(), self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out if input.dim() == 2 else out.view(*input.shape[:-1], out.shape[-1])


def _is_ordinary(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        type(x) is torch.Tensor
        and type(weight) is nn.Parameter
        and x.device.type == weight.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.dim() > 1
        and x.numel() * weight.shape[0] >= WORTHWHILE
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def _product(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """left @ right.T + bias"""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return out


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # A saved tensor must not change before the backward pass: save only what that pass needs.
        for_rows, for_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows if for_weight else None, weight if for_rows else None)
        return _product(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        gradient = given[0].contiguous()  # the gradient of a sum is one expanded number
        rows, weight = ctx.saved_tensors
        of_rows = of_weight = None
        again = torch.is_grad_enabled()  # second derivatives: oneDNN's product has none
        if weight is not None:
            of_rows = gradient.mm(weight) if again else _product(gradient, weight.t())
        if rows is not None:
            of_weight = gradient.t().mm(rows) if again else _product(gradient.t(), rows.t())
        of_bias = gradient if ctx.needs_input_grad[2] else None  # autograd sums it over the rows
        return of_rows, of_weight, of_bias
