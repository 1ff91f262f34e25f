"""Whether two sets of tensors belong to the same model: the same names, shapes and types; and if not, which differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from distbelief.errors import DistBeliefError

SHOWN = 30  # lines of a list of differences; more help nobody

Tensors = Mapping[str, torch.Tensor]


def differences(one: Tensors, one_is: str, other: Tensors, other_is: str) -> list[str]:
    """A line for each tensor in which they differ, in name order.

    >>> a, b = {"w": torch.zeros(2, 3), "v": torch.zeros(1)}, {"w": torch.zeros(4, 3)}
    >>> differences(a, "the run", b, "the model")
    ['v: float32 [1] in the run, missing in the model', 'w: float32 [2, 3] in the run, float32 [4, 3] in the model']
    """
    return [
        f"{name}: {_form(one.get(name))} in {one_is}, {_form(other.get(name))} in {other_is}"
        for name in sorted({*one, *other})
        if _form(one.get(name)) != _form(other.get(name))
    ]


def misfit(message: str, lines: Sequence[str], hint: str = "") -> DistBeliefError:
    """The error for `lines`: the first one in the message, all of them below it."""
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    listed = [*lines[:SHOWN], *([f"… and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])]
    return DistBeliefError(f"{message}: {lines[0]}{more}", hint=hint, details="\n".join(listed) if more else "")


def _form(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
