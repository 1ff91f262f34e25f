"""Carries out a tensor plan on a model on meta with torch's own parallel layers, and draws the dropout masks of divided
values.

Parameters become DTensors that know their part of the whole. Inputs and outputs of layers are plain tensors, so the
model's own code runs unchanged. Dividing communicates nothing: there are no values yet.

Dropout uses the random numbers of one process. A member with some of the heads or columns would draw a smaller mask
than one process does, so it would drop other values and leave the generator in another state. So where a plan says that
dropout meets a divided value, the member draws the mask of the whole value, as torch's CPU code does, and uses its part
of the mask. The members of a group seed their generators alike. The key of such a place is (last called layer of the
group, number of dropouts and attentions since then). So every call of a forward pass must run inside `whole_masks`; a
place that was missed is an error.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from distbelief.checkpoint.rules.boxes import Box
from distbelief.strategies.mesh.tensor.plan import TensorPlan
from distbelief.strategies.mesh.tensor.search import DropoutSite, Style

# --- dropout ---------------------------------------------------------------------------------------------------------

Key = tuple[str, int]


class DropoutMasks:
    """Draws the dropout masks of one member: `rank` among the `degree` members that divide the model."""

    def __init__(self, sites: Mapping[Key, DropoutSite], degree: int, rank: int) -> None:
        self.sites, self.degree, self.rank = sites, degree, rank
        self._here = threading.local()
        self._before: dict[str, set[Key]] = {}
        for key, site in sites.items():
            self._before.setdefault(site.row, set()).add(key)

    def called(self, layer: str) -> None:
        """Count dropouts and attentions from this call of a layer on."""
        self._here.last, self._here.count = layer, 0

    def next_site(self) -> DropoutSite | None:
        """The place in the plan of the dropout or attention that is called now."""
        key = (getattr(self._here, "last", ""), getattr(self._here, "count", 0))
        self._here.count = key[1] + 1
        if key in self.sites:
            self._passed().add(key)
        return self.sites.get(key)

    def end(self, row: str, *, training: bool) -> None:
        """Check, at the last layer of a group, that all places of dropout in the group were seen."""
        keys = self._before.get(row, set())
        missed = keys - self._passed()
        self._passed().difference_update(keys)
        if training and missed:
            raise RuntimeError(f"dropout between {min(missed)[0]} and {row} ran outside of whole_masks")

    @contextlib.contextmanager
    def entered(self) -> Iterator[bool]:
        """Yields whether this is the outermost context: a call must be counted once."""
        depth = getattr(self._here, "depth", 0)
        self._here.depth = depth + 1
        try:
            yield depth == 0
        finally:
            self._here.depth = depth

    def _passed(self) -> set[Key]:
        passed: set[Key] = self._here.__dict__.setdefault("passed", set())
        return passed

    def noise(self, like: torch.Tensor, site: DropoutSite, p: float) -> torch.Tensor:
        """This member's part of a mask of 0 and 1. The whole mask is laid out in memory as one process lays it out:
        torch may draw in that order."""
        dim, order = site.dim, site.order
        shape = list(like.shape)
        shape[dim] *= self.degree
        whole = torch.empty_permuted(shape, order, dtype=like.dtype, device=like.device).bernoulli_(1 - p)
        return whole.narrow(dim, self.rank * like.shape[dim], like.shape[dim])


@contextlib.contextmanager
def whole_masks(masks: DropoutMasks) -> Iterator[None]:
    """The context for every call of a divided model or a part of it, also for a backward pass that computes the forward
    again."""
    with masks.entered() as outermost, _Masking(masks) if outermost else contextlib.nullcontext():
        yield


class _Masking(TorchFunctionMode):
    def __init__(self, masks: DropoutMasks) -> None:
        super().__init__()
        self._masks = masks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is None or (site := self._masks.next_site()) is None:
            return func(*args, **kwargs)
        return rule(self._masks, site, func, *args, **kwargs)


def _dropout(
    masks: DropoutMasks,
    site: DropoutSite,
    func: Any,
    input: torch.Tensor,  # noqa: A002, torch's name for it
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    """input * (bernoulli(1 - p) / (1 - p)), as torch's own CPU code has it."""
    if not training or not 0 < p < 1:
        result: torch.Tensor = func(input, p, training, inplace) if func is F.dropout else func(input, p, training)
        return result
    noise = masks.noise(input, site, p).div_(1 - p)
    return input.mul_(noise) if inplace else input * noise


def _attention(
    masks: DropoutMasks,
    site: DropoutSite,
    func: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> torch.Tensor:
    """dropout(softmax(query keyᵀ · scale + mask)) value, step by step as torch's CPU code does if there is dropout.

    Fused kernels of other devices draw for each head as they like: there is no mask of one process to follow.
    """
    if not 0 < dropout_p < 1 or query.device.type != "cpu":
        result: torch.Tensor = func(query, key, value, attn_mask, dropout_p, is_causal, **more)
        return result
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    exact = torch.promote_types(dtype, torch.float32)
    with torch.autocast("cpu", enabled=False):
        q, k, v = (x.to(dtype).to(exact) for x in (query, key, value))
        if more.get("enable_gqa"):
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        scale = more.get("scale") or q.shape[-1] ** -0.5
        scores = (q * scale) @ k.transpose(-2, -1)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None:
            hidden = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if hidden else scores + attn_mask.to(dtype)
        weights = torch._safe_softmax(scores, -1)
        kept = masks.noise(weights, site, dropout_p).div_(1 - dropout_p)
        return ((weights * kept) @ v).to(dtype)


_RULES: dict[Any, Callable[..., torch.Tensor]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
}


def count_dropout_calls(model: nn.Module, plan: TensorPlan, rank: int) -> DropoutMasks:
    """Register hooks on the model's layers that report their calls to the returned masks."""
    masks = DropoutMasks(plan.sites, plan.degree, rank)
    rows = {site.row for site in plan.sites.values()}
    for name, module in model.named_modules():
        if plan.sites and plan.styles.get(name) in ("column", "row"):
            module.register_forward_hook(lambda module, args, output, name=name: masks.called(name))
        if name in rows:
            module.register_forward_pre_hook(lambda module, args, name=name: masks.end(name, training=module.training))
    return masks


# --- dividing a model ------------------------------------------------------------------------------------------------


def apply_plan(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> DropoutMasks:
    """Divide the layers of a model in place over a mesh of one dimension. Every call of the model must run inside
    `whole_masks` of the result."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, name))
    for name, style in plan.styles.items():
        parallelize_module(model.get_submodule(name), mesh, _parallel(style), src_data_rank=None)
    for sharing in owners.values():
        first, name = sharing[0]
        for other, attribute in sharing[1:]:  # tied parameters stay one tensor
            other.register_parameter(attribute, first.get_parameter(name))
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):  # its fused code for evaluation does not work with parts
            module.activation_relu_or_gelu = 0
    return count_dropout_calls(model, plan, mesh.get_local_rank())


def _parallel(style: Style) -> ParallelStyle:
    match style:
        case "column":
            return ColwiseParallel()
        case "row":
            return RowwiseParallel()
        case "column_gather":
            return ColwiseParallel(output_layouts=Replicate())
        case "row_split" | "vocabulary":
            return RowwiseParallel(input_layouts=Replicate())


def held_box(parameter: torch.Tensor) -> Box:
    """The box of the whole parameter that this member holds.

    Each division makes equal pieces and leaves the last ones short or empty, as torch.chunk does. If one dimension is
    divided twice, FSDP2 divides the pieces of tensor parallelism, and torch marks them as strided.
    """
    box = [(0, size) for size in parameter.shape]
    if not isinstance(parameter, DTensor):
        return tuple(box)
    place = parameter.device_mesh.get_coordinate()
    assert place is not None
    divisions = [
        (isinstance(placement, _StridedShard), placement.dim, place[axis], parameter.device_mesh.size(axis))
        for axis, placement in enumerate(parameter.placements)
        if isinstance(placement, Shard | _StridedShard)
    ]
    for _, dim, rank, members in sorted(divisions, key=lambda division: division[0]):
        start, end = box[dim]
        piece = math.ceil((end - start) / members)
        box[dim] = (min(end, start + rank * piece), min(end, start + (rank + 1) * piece))
    return tuple(box)
