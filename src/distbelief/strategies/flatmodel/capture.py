"""Captures gradients: each goes from autograd straight to its parameter's place in a slot.

`GradientCapture` has a hook on every parameter. autograd allocates a tensor for each gradient, and the hook copies it
once, while it is in the cache. (Accumulation into zeroed views would read and write more, and would change signs of
zeros.)

The weights of large linear layers need no copy: while a shard is computed, these layers have the class that
`slot_linear` makes, whose matrix product writes into the slot. It calls the same products as torch's own derivative, on
the same numbers in the same layout, so the bits are the same. autograd takes the slot's memory as the gradient; weights
that are used twice, hooks and second derivatives work as usual. Unusual cases (autocast, a compiler, functional
transforms) are left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from distbelief.errors import JobError
from distbelief.strategies.flatmodel.layout import Layout


class GradientCapture:
    """Hooks on the parameters of one model. Between `start` and `finish` one backward pass fills one slot."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], layout: Layout, placed: Sequence[torch.nn.Linear] = ()
    ) -> None:
        """`placed`: layers that write their weight's gradient into the slot."""
        self._names = [layout.entries[i].name for i in layout.entries_of("parameter")]
        self._tiles: list[list[int]] = [[] for _ in parameters]
        self._pieces = [0] * layout.parameter_tiles
        for tile in range(layout.parameter_tiles):
            for piece in layout.pieces[tile]:
                self._tiles[piece.entry].append(tile)
                self._pieces[tile] += 1
        self._pending = list(self._pieces)
        self._touched = np.zeros(len(parameters), np.uint8)
        self._views: Sequence[torch.Tensor] = []
        self._tile_ready: Callable[[int], None] = lambda tile: None
        self._placed = placed
        self._slot_linear = slot_linear(self._place)
        self._numbers = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._given: set[int] = set()
        """Parameters whose slot memory autograd already has as a gradient in this backward pass."""
        for index, parameter in enumerate(parameters):
            hook = partial(self._captured, index)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def start(self, views: Sequence[torch.Tensor], tile_ready: Callable[[int], None]) -> None:
        """`tile_ready(tile)` is called once per parameter tile, as soon as all of its gradients are in place."""
        self._views = views
        self._tile_ready = tile_ready
        self._pending = list(self._pieces)
        self._touched.fill(0)
        self._given.clear()
        for layer in self._placed:
            layer.__class__ = self._slot_linear

    def _place(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Returns the weight's view of the slot on the first call in a backward pass, later None, because autograd then
        uses that memory as the gradient."""
        index = self._numbers.get(id(weight))
        if index is None or index in self._given or not self._views:
            return None
        self._given.add(index)
        return self._views[index].detach()

    @property
    def touched_so_far(self) -> np.ndarray:
        return self._touched

    def _captured(self, index: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is None or not self._views:
            return
        if gradient.is_sparse:
            gradient = gradient.coalesce().to_dense()
        if self._touched[index]:
            self._again(index, gradient)
            return
        self._touched[index] = 1
        if gradient.data_ptr() != self._views[index].data_ptr():
            self._views[index].copy_(gradient)
        self._count(index)

    def _count(self, index: int) -> None:
        for tile in self._tiles[index]:
            self._pending[tile] -= 1
            if self._pending[tile] == 0:
                self._tile_ready(tile)

    def _again(self, index: int, gradient: torch.Tensor) -> None:
        if any(self._pending[tile] == 0 for tile in self._tiles[index]):
            raise JobError(
                f"the parameter '{self._names[index]}' got its gradient in several parts during one backward pass",
                hint="with torch.utils.checkpoint use use_reentrant=False; call backward() nowhere in the model",
            )
        self._views[index].add_(gradient)

    def finish(self) -> np.ndarray:
        """End the backward pass; a parameter without a gradient counts as zeros. Returns a flag per parameter: whether
        it had a gradient."""
        for index in np.flatnonzero(self._touched == 0).tolist():
            self._views[index].zero_()
            self._count(index)
        self.let_go()
        return self._touched.copy()

    def let_go(self) -> None:
        """Stop capturing, and release the slot and the callback."""
        self._views = []
        self._tile_ready = lambda tile: None
        for layer in self._placed:
            layer.__class__ = torch.nn.Linear


Place = Callable[[torch.Tensor], torch.Tensor | None]
"""The place for a weight's gradient; None: not in a slot."""

WORTHWHILE = 1 << 16
"""Elements; below it, Python calls cost more than a copy."""


def placeable(model: nn.Module, parameters: Collection[nn.Parameter]) -> list[nn.Linear]:
    """The linear layers that gain by writing their gradients into the slot."""
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
    """Whether torch would compute only `addmm` or `mm` here."""
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
        ctx.place = partial(place, weight)  # the saved weight may come back as another object
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
