"""What a replica keeps from one round to the next, as bytes: its optimizer's state, tile after tile; then, where
differences are compressed, what it has not sent of them yet."""

from __future__ import annotations

import torch

from distbelief.compression.parts import PartsCoding
from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.flatmodel.tileoptimizer import Recipe, state_bytes

_LINE = 64


def kept_bytes(layout: Layout, recipe: Recipe, coding: PartsCoding | None) -> int:
    return owed_at(layout, recipe) + 4 * coding.elements if coding else optimizer_bytes(layout, recipe)


def optimizer_bytes(layout: Layout, recipe: Recipe) -> int:
    return sum(state_bytes(recipe, layout, tile) for tile in range(layout.parameter_tiles))


def owed_at(layout: Layout, recipe: Recipe) -> int:
    """The byte at which the residual starts."""
    return -(-optimizer_bytes(layout, recipe) // _LINE) * _LINE


def owed(kept: torch.Tensor, coding: PartsCoding) -> torch.Tensor:
    """The residual: it is what lies at the end."""
    return kept[len(kept) - 4 * coding.elements :].view(torch.float32)
