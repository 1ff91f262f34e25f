"""Linear layers whose weight's gradient is made in the slot itself: the matrix product writes there, nothing is copied.

While a shard is computed, the large ones of a model are of this class. It calls the products that torch's own
derivative calls, on the same numbers in the same layout, so the bits are the same. autograd is handed the slot's memory
as the gradient and goes on as ever: a weight that is used twice, hooks on it and second derivatives are its business.
Whatever is out of the ordinary (autocast, a compiler, transforms of functions) is left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn

Place = Callable[[torch.Tensor], torch.Tensor | None]
"""Where the gradient of that weight is to be made; None: somewhere else than in a slot."""

WORTHWHILE = 1 << 16
"""Elements: for fewer, calls in Python cost more than a copy."""


def placeable(model: nn.Module, parameters: Collection[nn.Parameter]) -> list[nn.Linear]:
    """The layers that gain by it."""
    trained = {id(parameter) for parameter in parameters}
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear and id(module.weight) in trained and module.weight.numel() >= WORTHWHILE
    ]


def slot_linear(place: Place) -> type[nn.Linear]:
    """The class for layers whose gradients go where `place` says."""

    class Linear(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch names it
            if not _is_ordinary(input, self.weight):
                return super().forward(input)
            rows = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
            out: torch.Tensor = _Placed.apply(rows, self.weight, self.bias, place)  # type: ignore[no-untyped-call]
            return out if input.dim() == 2 else out.view(*input.shape[:-1], out.shape[-1])

    return Linear


def _is_ordinary(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch would take `addmm` or `mm` of it and of nothing else."""
    return (
        torch.is_grad_enabled()
        and type(x) is torch.Tensor
        and type(weight) is nn.Parameter
        and x.dim() in (2, 3)
        and x.is_contiguous()
        and x.dtype == weight.dtype
        and not torch.is_autocast_enabled(x.device.type)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, place: Place
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.place = partial(place, weight)  # what was saved may come back as another object
        return rows.mm(weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None]:
        (gradient,) = given
        rows, weight = ctx.saved_tensors
        for_rows, for_weight, for_bias, _ = ctx.needs_input_grad
        place = ctx.place() if for_weight and not torch.is_grad_enabled() else None
        of_rows = gradient.mm(weight) if for_rows else None
        of_weight = None
        if place is not None:
            of_weight = torch.mm(gradient.t(), rows, out=place)
        elif for_weight:
            of_weight = gradient.t().mm(rows)
        return of_rows, of_weight, gradient if for_bias else None, None  # autograd sums the bias's over the rows
