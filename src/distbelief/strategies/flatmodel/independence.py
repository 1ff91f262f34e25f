"""Refuses models whose shards would have to know of each other: SyncBatchNorm, and buffers with a row for every sample.

Every shard of a step is computed by itself, from the buffers that were committed before the step. Afterwards float
buffers become their average over the shards. That is right for statistics such as those of BatchNorm. It is meaningless
for a buffer that carries a value for every sample to the next batch, for example a recurrent layer's hidden state: row
3 of one shard and row 3 of another belong to different samples.

Such a buffer is recognised by two properties together, on shard 0 of step 0:

- Its rows follow the samples. If the samples come in another order, the buffer has the same rows in that other order.
  Statistics stay the same (within rounding).
- The model reads it: with the buffer as the shard has left it, the same batch gives another loss.

Both must hold, so neither statistics nor a copy of activations that is only kept for logging is taken for such a
buffer. Not recognised: a buffer without an axis of the shard's size (a queue of keys that is longer than a shard), and
a hidden state after dropout, whose mask does not follow the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from distbelief.errors import JobError
from distbelief.strategies.flatmodel.layout import float_buffers

Look = Callable[[Any, Mapping[str, torch.Tensor]], tuple[float, dict[str, torch.Tensor]]]
"""(batch, values of some buffers to begin with) -> the loss, and all float buffers afterwards."""

_CLOSE = 1e-3  # relative to the largest value: far above rounding, far below the distance of two samples' rows


def require_no_sync_batch_norm(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        kinds = [kind.__name__ for kind in type(module).__mro__]
        if any(kind.endswith("SyncBatchNorm") for kind in kinds):  # torch's, and those of other libraries
            raise JobError(
                f"the module '{name}' is a {kinds[0]}, and nothing would synchronise it: each shard of a step is "
                "computed by itself",
                hint="make it a BatchNorm1d, 2d or 3d (without convert_sync_batchnorm), which normalises each shard by "
                "the shard's own statistics and averages the running statistics over the shards. Fewer `shards` are "
                "larger; GroupNorm depends on no batch",
            )


def require_no_rows_of_samples(model: torch.nn.Module, look: Look, batch: Any, samples: int) -> None:
    if samples < 2 or not any(samples in buffer.shape for _, buffer in float_buffers(model)):
        return
    order = torch.arange(samples).roll(1)
    loss, after = look(batch, {})
    changed = [name for name, b in float_buffers(model) if samples in b.shape and not torch.equal(after[name], b)]
    if not changed:
        return
    try:
        _, reordered = look(_reordered(batch, order), {})
    except Exception:  # the model wants its samples in a certain order, for example by length
        return
    for name in changed:
        if _follows(after[name], reordered[name], order) and look(batch, {name: after[name]})[0] != loss:
            raise JobError(
                f"the model's buffer '{name}' carries a value for every sample from one batch to the next; buffers are "
                "averaged over the shards of a step, whose samples are different ones",
                hint="begin every batch with a new state, and let a sample be a whole sequence; or set `shards=1`: "
                "then nothing is averaged, and one worker computes",
            )


def _reordered(batch: Any, order: torch.Tensor) -> Any:
    def reorder(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[order] if tensor.dim() and len(tensor) == len(order) else tensor

    return torch.utils._pytree.tree_map_only(torch.Tensor, reorder, batch)


def _follows(one: torch.Tensor, other: torch.Tensor, order: torch.Tensor) -> bool:
    """Whether `other` has the rows of `one` in this order, along any axis, and not in the old order."""
    if one.shape != other.shape or _are_close(one, other):
        return False
    order = order.to(one.device)
    axes = [axis for axis, size in enumerate(one.shape) if size == len(order)]
    return any(_are_close(one.index_select(axis, order), other) for axis in axes)


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    difference, scale = (one - other).abs().max(), torch.maximum(one.abs().max(), other.abs().max())
    return bool(difference <= _CLOSE * scale)
