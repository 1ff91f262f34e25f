"""Compares the outputs of an exported model with the outputs of the original model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distbelief.errors import DistBeliefError

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Relative to the largest output, or to 1. Another order of additions stays far below; a wrong operation exceeds it."""


def largest_difference(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    """The largest difference between two corresponding numbers. Raises a DistBeliefError if rounding cannot explain it.

    >>> largest_difference([torch.ones(2)], [torch.ones(2) + 1e-6])
    9.5367431640625e-07
    """
    forms = [[(tensor.dtype, tuple(tensor.shape)) for tensor in side] for side in (expected, found)]
    if forms[0] != forms[1]:
        raise _wrong(f"{_listed(forms[1])} in place of {_listed(forms[0])}")
    largest = 0.0
    for one, other in zip(expected, found, strict=True):
        wide = torch.complex128 if one.is_complex() else torch.float64
        a, b = one.to(wide), other.to(wide)
        same = (a == b) | (a.isnan() & b.isnan())  # equal infinities count as equal; their difference would be NaN
        if same.all():
            continue
        difference = (a - b).abs()[~same].max().item()
        scale = max(1.0, a.abs().nan_to_num(0.0, 0.0, 0.0).max().item())
        if not difference <= _TOLERANCES.get(one.dtype, 0.0) * scale:
            raise _wrong(f"they differ by up to {difference:.3g}")
        largest = max(largest, difference)
    return largest


def in_words(difference: float, samples: Sequence[int]) -> str:
    """
    >>> in_words(0.0, [3, 5])
    'same output as the model, bit for bit, on batches of 3 and 5'
    """
    how = "bit for bit" if difference == 0 else f"within {difference:.1e}"
    sizes = f"batches of {' and '.join(map(str, samples))}" if len(samples) > 1 else f"a batch of {samples[0]}"
    return f"same output as the model, {how}, on {sizes}"


def _wrong(what: str) -> DistBeliefError:
    return DistBeliefError(
        f"the exported model gives other outputs than the model: {what}",
        hint="nothing was written; does the model do something else each time it is called?",
    )


def _listed(forms: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in forms) or "nothing"
