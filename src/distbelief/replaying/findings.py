"""Counts values that are not finite, and describes where they are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

MODEL, LOSS, BATCH = "(model)", "(loss)", "(batch)"
"""Used in place of a layer's name for the outermost module, the job's loss function, and the samples. No module has
such a name.
"""


@dataclass(frozen=True)
class Count:
    nan: int = 0
    infinite: int = 0

    def __bool__(self) -> bool:
        return bool(self.nan or self.infinite)

    def __add__(self, other: Count) -> Count:
        return Count(self.nan + other.nan, self.infinite + other.infinite)


@dataclass(frozen=True)
class Finding:
    where: Literal["parameter", "buffer", "batch", "output", "loss", "gradient"]
    layer: str
    name: str
    """The name of the parameter, the buffer, the place in the batch, or the operation of the backward pass; or
    empty."""
    shard: int | None
    count: Count
    origin: bool
    """Whether all inputs of the value were finite."""
    samples: tuple[int, ...] = ()
    """Sample indices of the rows with such values, if rows are samples."""


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The floating tensors in a batch or an output, in any nesting."""
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            yield leaf.detach()


def not_finite(value: Any) -> Count:
    """
    >>> not_finite({"x": torch.tensor([1.0, float("nan")]), "y": [torch.tensor(float("-inf"))], "z": torch.arange(3)})
    Count(nan=1, infinite=1)
    """
    found = Count()
    for tensor in tensors(value):
        numbers = _numbers(tensor)
        if not bool(torch.isfinite(numbers).all()):
            found += Count(int(numbers.isnan().sum()), int(numbers.isinf().sum()))
    return found


def bad_samples(value: Any, indices: Sequence[int]) -> tuple[int, ...]:
    """The samples whose row has a value that is not finite; empty if rows are not samples.

    >>> bad_samples(torch.tensor([[1.0, 2.0], [float("nan"), 0.0]]), [17, 4])
    (4,)
    """
    bad: set[int] = set()
    for tensor in tensors(value):
        if tensor.layout == torch.strided and tensor.dim() and len(tensor) == len(indices):
            rows = ~torch.isfinite(_numbers(tensor)).reshape(len(indices), -1).all(1)
            bad |= {indices[row] for row in rows.nonzero().flatten().tolist()}
    return tuple(index for index in indices if index in bad)


def in_state(model: torch.nn.Module, on_purpose: Collection[str] = ()) -> list[Finding]:
    """Parameters and buffers that are not finite. `on_purpose`: buffers that may be so, such as masks with -inf."""
    found = []
    for name, parameter in model.named_parameters():
        if count := not_finite(parameter):
            found.append(Finding("parameter", layer_of(name), name, None, count, origin=False))
    for name, buffer in model.named_buffers():
        if name not in on_purpose and (count := not_finite(buffer)):
            found.append(Finding("buffer", layer_of(name), name, None, count, origin=False))
    return found


def layer_of(name: str) -> str:
    """The module of a parameter or buffer.

    >>> layer_of("body.0.weight"), layer_of("scale")
    ('body.0', '(model)')
    """
    return name.rpartition(".")[0] or MODEL


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided:
        tensor = tensor.coalesce().values() if tensor.is_sparse else tensor.to_dense()
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor  # 8-bit types lack some operations
