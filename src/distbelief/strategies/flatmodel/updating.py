"""The update of some tiles: what every step does to them once their gradients are there, whoever does it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from distbelief.data.seeding import seed_everything
from distbelief.shards import mix
from distbelief.strategies.flatmodel.layout import Layout, Piece
from distbelief.strategies.flatmodel.tileoptimizer import Recipe, TileMemory, TileOptimizer

_SCALED_EXACTLY = (torch.float32, torch.float64)
"""Narrower ones are widened by the optimizer before it divides, and not rounded after it."""


class TileUpdates:
    """The job's optimizer over some tiles of parameters. `apart`: they are updated one by one."""

    def __init__(
        self, seed: int, recipe: Recipe, layout: Layout, tiles: Sequence[TileMemory], apart: bool = False
    ) -> None:
        self._seed = seed
        self._elementwise = recipe.elementwise
        self._scales = recipe.fused and all(one.values.dtype in _SCALED_EXACTLY for one in tiles)
        self._parameters = len(layout.entries_of("parameter"))
        # An optimizer that is not element-wise may couple what it is given, and may draw random numbers. So it is given
        # what the number of members has no say in: one tile, and a seed of its own.
        sets = [tiles] if recipe.elementwise and not apart else [[one] for one in tiles]
        self._optimizers = {some[0].tile: TileOptimizer(recipe, layout, some) for some in sets if some}

    def may_scale(self, factor: float) -> bool:
        """Whether the optimizer can scale the gradients itself, in the pass in which it uses them, to the bits that a
        pass before would give. It divides by the inverse: the same for a power of two only."""
        return self._scales and math.frexp(factor)[0] == 0.5

    def apply(
        self,
        step: int,
        gradients: dict[int, torch.Tensor],
        rate: float,
        untouched: np.ndarray,
        scale: float = 1.0,
    ) -> None:
        """One step, of all tiles together or of some of those that are apart. The gradients (by tile) may be
        overwritten. Entries that nobody touched are left as they are. `rate`: by what the learning rate is
        multiplied; `scale`: and the gradients, if the optimizer may."""
        skip = untouched if untouched[: self._parameters].any() else None
        divisor = _divisor(scale)
        for first in gradients:
            if optimizer := self._optimizers.get(first):
                if not self._elementwise:
                    seed_everything(mix(self._seed, 4, step, first) >> 1)
                optimizer.update(gradients, rate, skip, divisor)


@lru_cache(maxsize=4)
def _divisor(scale: float) -> torch.Tensor | None:
    if scale == 1.0:
        return None
    return torch.tensor(1.0 / scale, dtype=torch.float32, device="cpu")  # whatever a job has made the default


def norms(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Of each, taken in float64. All are on one device, which is waited for once."""
    found = [torch.linalg.vector_norm(one, dtype=torch.float64) for one in tensors]
    numbers: list[float] = torch.stack(found).tolist() if found else []
    return numbers


def set_buffers(values: torch.Tensor, average: torch.Tensor, pieces: Sequence[Piece], untouched: np.ndarray) -> None:
    """The float buffers of a tile become the average over the shards, where any shard has changed them: the average of
    equal numbers is not always that number."""
    for piece in pieces:
        if not untouched[piece.entry]:
            part = slice(piece.tile_first, piece.tile_first + piece.numel)
            values[part] = average[part]
