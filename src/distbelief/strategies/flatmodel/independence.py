"""Refuses models whose shards would have to know of each other: SyncBatchNorm, and buffers with a row for every sample.

Every shard of a step is computed by itself, from the buffers that were committed before the step. Afterwards float
buffers become their average over the shards. That is right for statistics such as those of BatchNorm. It is meaningless
for a buffer that carries a value for every sample to the next batch, for example a recurrent layer's hidden state: row
3 of one shard and row 3 of another belong to different samples.

Such a buffer is recognised by two properties together, on shard 0 of step 0:

- Its rows follow the samples. If the samples come in another order, the buffer has the same rows in that other order.
  Statistics stay the same (within rounding). Of a longer buffer (a queue of keys, as in MoCo) these are the rows that
  the shard has changed, if there is exactly one for each sample, and they follow one another.
- The model reads it: with the buffer as the shard has left it, the same batch gives another loss.

Both must hold, so neither statistics nor a copy of activations that is only kept for logging is taken for such a
buffer. Not recognised: a hidden state after dropout, whose mask does not follow the samples, and rows in other places
of a longer buffer.
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
    if samples < 2 or not any(size >= samples for _, buffer in float_buffers(model) for size in buffer.shape):
        return
    order = torch.arange(samples).roll(1)
    loss, after = look(batch, {})
    changed = {name: found for name, b in float_buffers(model) if (found := _changed_rows(b, after[name], samples))}
    if not changed:
        return
    try:
        _, reordered = look(_reordered(batch, order), {})
    except Exception:  # the model wants its samples in a certain order, for example by length
        return
    for name, rows in changed.items():
        if (
            any(_follows(after[name], reordered[name], order, *one) for one in rows)
            and look(batch, {name: after[name]})[0] != loss
        ):
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


def _changed_rows(before: torch.Tensor, after: torch.Tensor, samples: int) -> list[tuple[int, int]]:
    """(axis, first row) of the rows that may belong to the samples, by axis."""
    if before.shape != after.shape or torch.equal(before, after):
        return []
    found = []
    for axis, size in enumerate(before.shape):
        if size == samples:
            found.append((axis, 0))
        elif size > samples:
            others = [other for other in range(before.dim()) if other != axis]
            differs = (before != after).any(others) if others else before != after
            rows = differs.nonzero().flatten().tolist()
            if len(rows) == samples and rows[-1] - rows[0] == samples - 1:
                found.append((axis, rows[0]))
    return found


def _follows(one: torch.Tensor, other: torch.Tensor, order: torch.Tensor, axis: int, first: int) -> bool:
    """Whether `other` has these rows of `one` in this order, and not in the old order."""
    if one.shape != other.shape:
        return False
    one, other = (tensor.narrow(axis, first, len(order)) for tensor in (one, other))
    return not _are_close(one, other) and _are_close(one.index_select(axis, order.to(one.device)), other)


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    difference, scale = (one - other).abs().max(), torch.maximum(one.abs().max(), other.abs().max())
    return bool(difference <= _CLOSE * scale)
