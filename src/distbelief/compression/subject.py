"""What of a flat layout is compressed, and how: all that an exchange must know of the model."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """One float32 parameter in the layout."""

    mark: int
    """Its number among all entries of the layout."""
    first: int
    """Its first element, counted in float32 from the layout's beginning."""
    shape: tuple[int, ...]

    @property
    def part(self) -> slice:
        return slice(self.first, self.first + math.prod(self.shape))


@dataclass(frozen=True)
class Compression:
    method: str
    """An option as `option.canonical` writes it."""
    tiles: frozenset[int]
    """Those of float32 parameters. All others, as those of buffers, go as they are."""
    places: tuple[Place, ...]
    seed: int
    always: bool = False
    """It is not switched off where it costs more time than it saves."""
    apart: bool = False
    """Partial sums are encoded by whoever makes them, parameter by parameter, and go to everybody: the sums are then
    those of an exact strategy."""
