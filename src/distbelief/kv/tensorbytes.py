"""Tensors as bytes: for messages, and several together for a copy of a slice. No pickle."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from msgspec import Struct


class TensorKind(Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]


def dtype_of(name: str) -> torch.dtype:
    """The dtype with that name.

    >>> dtype_of("bfloat16")
    torch.bfloat16
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of numbers")
    return found


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: a view if the tensor is contiguous.

    >>> as_bytes(torch.ones(2, 3)).shape, as_bytes(torch.zeros(0, 3)).shape
    (torch.Size([24]), torch.Size([0]))
    """
    if not tensor.numel():  # its strides may be anything
        return torch.zeros(0, dtype=torch.uint8)
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def packed(tensors: Sequence[torch.Tensor]) -> tuple[list[TensorKind], torch.Tensor]:
    """(types and shapes, all bytes one after the other).

    >>> kinds, content = packed([torch.ones(2), torch.tensor(3.0, dtype=torch.float64)])
    >>> content.numel(), unpacked(kinds, content)
    (16, [tensor([1., 1.]), tensor(3., dtype=torch.float64)])
    """
    kinds = [TensorKind(name_of(one.dtype), tuple(one.shape)) for one in tensors]
    parts = [as_bytes(one) for one in tensors]
    return kinds, torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)


def unpacked(kinds: Sequence[TensorKind], content: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that `packed` made bytes of, as aligned copies."""
    found, at = [], 0
    for kind in kinds:
        dtype = dtype_of(kind.dtype)
        size_bytes = math.prod(kind.shape) * dtype.itemsize
        found.append(content[at : at + size_bytes].clone().view(dtype).reshape(kind.shape))
        at += size_bytes
    return found
