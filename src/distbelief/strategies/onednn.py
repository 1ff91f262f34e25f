"""Linear layers whose matrix products are oneDNN's, which torch's convolutions use too, instead of its BLAS's.

torch's BLAS is Intel's, and on others' processors it does not use their widest instructions: oneDNN is about twice as
fast there (docs/matmul.md). It adds in another order, so the last bits differ from torch's own; a job asks for it
(`Job.matmul`). Which library multiplies depends on shapes and types
alone, never on the worker: the result does not depend on the cluster here either.

Whatever is out of the ordinary (autocast, a compiler, transforms of functions, second derivatives) is left to torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distbelief.errors import JobError

WORTHWHILE = 1 << 20
"""Multiplications: for fewer, what oneDNN does around a product costs more than the product."""
SMALL = 1 << 12
"""Elements of a weight that few batches are large enough for."""


def use_onednn(model: nn.Module) -> None:
    """Have the larger linear layers of a model multiply with oneDNN, in training and evaluation.

    >>> model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 2))
    >>> use_onednn(model)
    >>> [type(layer).__name__ for layer in model]
    ['OneDnnLinear', 'Linear']
    """
    if not torch.backends.mkldnn.is_available():
        raise JobError("this build of torch has no oneDNN", hint="leave `matmul` out of the job")
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= SMALL:
            module.__class__ = OneDnnLinear


class OneDnnLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch names it
        if not _is_ordinary(input, self.weight):
            return super().forward(input)
        rows = input.reshape(-1, input.shape[-1])
        out: torch.Tensor = _Products.apply(rows, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out.view(*input.shape[:-1], out.shape[-1])


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
        ctx.save_for_backward(rows, weight)
        return _product(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        gradient = given[0].contiguous()  # that of a sum is one number, seen everywhere
        rows, weight = ctx.saved_tensors
        for_rows, for_weight, for_bias = ctx.needs_input_grad
        if torch.is_grad_enabled():  # oneDNN's product has no derivative
            of_rows = gradient.mm(weight) if for_rows else None
            of_weight = gradient.t().mm(rows) if for_weight else None
        else:
            of_rows = _product(gradient, weight.t()) if for_rows else None
            of_weight = _product(gradient.t(), rows.t()) if for_weight else None
        return of_rows, of_weight, gradient if for_bias else None  # autograd sums the bias's over the rows
