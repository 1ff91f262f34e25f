"""Compares the names, shapes and types of two sets of tensors: do they belong to the same model?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from distbelief.errors import DistBeliefError

SHOWN = 30  # most lines in a list of differences; longer lists do not help

Forms = Mapping[str, str]
"""Name -> type and shape, as text."""


def form(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype} {list(shape)}"


def forms(tensors: Mapping[str, torch.Tensor]) -> Forms:
    return {name: form(str(tensor.dtype).removeprefix("torch."), tensor.shape) for name, tensor in tensors.items()}


def differences(one: Forms, one_is: str, other: Forms, other_is: str) -> list[str]:
    """One line for each tensor that differs, in name order.

    >>> a, b = {"w": torch.zeros(2, 3), "v": torch.zeros(1)}, {"w": torch.zeros(4, 3)}
    >>> differences(forms(a), "the run", forms(b), "the model")
    ['v: float32 [1] in the run, missing in the model', 'w: float32 [2, 3] in the run, float32 [4, 3] in the model']
    """
    return [
        f"{name}: {one.get(name, 'missing')} in {one_is}, {other.get(name, 'missing')} in {other_is}"
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    ]


def misfit(
    message: str, lines: Sequence[str], hint: str = "", kind: type[DistBeliefError] = DistBeliefError
) -> DistBeliefError:
    """The error for `lines`: the message has the first line, the details have all of them."""
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    listed = [*lines[:SHOWN], *([f"… and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])]
    return kind(f"{message}: {lines[0]}{more}", hint=hint, details="\n".join(listed) if more else "")
