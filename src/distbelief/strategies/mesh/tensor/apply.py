"""A tensor plan carried out on a model on meta, with torch's own parallel layers; and who holds what afterwards.

Parameters become DTensors that know their part of the whole; inputs and outputs of layers are plain tensors, so that
the model's own code runs as it is. Nothing is communicated here: there are no values yet.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from distbelief.checkpoint.boxes import Box
from distbelief.strategies.mesh.tensor import headdropout
from distbelief.strategies.mesh.tensor.plan import TensorPlan
from distbelief.strategies.mesh.tensor.search import Style


def apply(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> headdropout.Masks:
    """Divide the layers of a model in place over a mesh of one dimension. What is returned goes around every call of
    the model, or a part of it (`headdropout.whole_masks`)."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, name))
    for name, style in plan.styles.items():
        parallelize_module(model.get_submodule(name), mesh, _parallel(style), src_data_rank=None)
    for sharing in owners.values():
        first, name = sharing[0]
        for other, attribute in sharing[1:]:  # one tensor stays one tensor
            other.register_parameter(attribute, first.get_parameter(name))
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):  # its fused way for evaluation cannot take parts
            module.activation_relu_or_gelu = 0
    return headdropout.watch(model, plan, mesh.get_local_rank())


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
    """Which part of the whole parameter this member holds.

    Each division takes equal pieces and leaves the last ones short, or empty, as torch.chunk does. Where one dimension
    is divided twice, FSDP2 divides what tensor parallelism had divided already, and torch marks its piece as strided.
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
