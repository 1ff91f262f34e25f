"""Gradients go from autograd straight into a slot of the flat layout, parameter by parameter, as they are ready.

autograd makes its own tensor for each gradient and it is copied once, while it is still in the cache. (Accumulating
into zeroed views would read and write more, and gives another sign of zero: one way, always.) The gradients of large
linear layers are made in the slot (slotlinear.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from distbelief.errors import JobError
from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.flatmodel.slotlinear import slot_linear


class GradientCapture:
    """Hooks on the parameters of one model. Between `start` and `finish` one backward pass fills one slot."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], layout: Layout, placed: Sequence[torch.nn.Linear] = ()
    ) -> None:
        """`placed`: layers that make their weight's gradient in the slot."""
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
        """Parameters whose place autograd has."""
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
        """Its place in the slot, once: what is there then is autograd's."""
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
        """The backward pass is over: parameters without a gradient count as zeros in the sum. Returns who had one."""
        for index in np.flatnonzero(self._touched == 0).tolist():
            self._views[index].zero_()
            self._count(index)
        self.let_go()
        return self._touched.copy()

    def let_go(self) -> None:
        """Nothing is captured from here on, and nothing held of the slot or of who wanted to know of its tiles."""
        self._views = []
        self._tile_ready = lambda tile: None
        for layer in self._placed:
            layer.__class__ = torch.nn.Linear
