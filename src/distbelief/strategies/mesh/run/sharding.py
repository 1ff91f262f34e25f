"""FSDP2 for a stage, with our own collectives. `fully_shard` divides every parameter among the members of the sharded
dimension; a block of layers is gathered when it is needed and freed afterwards.

torch's defaults do not fit gloo. gloo's reduce-scatter takes, measured, several times the memory of a block and as much
time as an all-reduce. And the messages are long: memory that is allocated and freed for each message is either cleared
by the system every time, or leaves holes that the next message does not fit into. So gathers and sums go through one
scratch buffer that is never freed.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from distbelief.strategies.mesh.run.groups import MeshGroups

_SMALLEST_BLOCK = 1 / 64  # of the model's parameters: a smaller block does not pay for a collective of its own
_SMALLEST_MAPPING_BYTES = 1 << 20

Network = Callable[[], AbstractContextManager[None]]
"""The context for all waiting: see `TorchGroup.network`."""


class ScratchBuffer:
    """One piece of memory for message after message: as long as the longest message so far, and never freed."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns the memory. The caller before must have no more use for it."""
        size_bytes = count * dtype.itemsize
        if self._memory.numel() < size_bytes:
            self._memory = mapped(size_bytes, torch.uint8)
        return self._memory[:size_bytes].view(dtype)


class ScratchGather(AllGather):
    """All-gather into the scratch buffer."""

    def __init__(self, scratch: ScratchBuffer, network: Network) -> None:
        self._scratch = scratch
        self._network = network

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._scratch.take(_count(size), dtype)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """`input_tensor` is this member's piece of `output_tensor`."""
        with self._network():
            _exchange(group, lambda _: input_tensor, output_tensor.chunk(group.size()).__getitem__)


class ScratchReduceScatter(ReduceScatter):
    """Reduce-scatter: member k gets the sum of all members' pieces k, added in the order of the members."""

    def __init__(self, scratch: ScratchBuffer, network: Network) -> None:
        self._scratch = scratch
        self._network = network
        self._has_input = False

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the pieces, which are not needed afterwards; then memory for the sum, which stays until the end of
        the step."""
        if not self._has_input:
            self._has_input = True
            return self._scratch.take(_count(size), dtype)
        return mapped(_count(size), dtype)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: object,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        self._has_input = False
        if output_tensor.untyped_storage().data_ptr() == input_tensor.untyped_storage().data_ptr():
            raise RuntimeError("torch asks for memory in another order than this was written for")
        me, pieces = group.rank(), input_tensor.chunk(group.size())
        arrived = [piece if rank == me else torch.empty_like(piece) for rank, piece in enumerate(pieces)]
        with self._network():
            _exchange(group, pieces.__getitem__, arrived.__getitem__)
        torch.add(arrived[0], arrived[1], out=output_tensor)
        for piece in arrived[2:]:
            output_tensor += piece


def mapped(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory outside of the heap if it is long, so that memory kept for a while leaves no holes in the heap."""
    size_bytes = count * dtype.itemsize
    if size_bytes < _SMALLEST_MAPPING_BYTES:
        return torch.empty(count, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=dtype)


def _count(size: Sequence[int | torch.SymInt]) -> int:
    return math.prod(int(length) for length in size)


def _exchange(
    group: dist.ProcessGroup, give: Callable[[int], torch.Tensor], take: Callable[[int], torch.Tensor]
) -> None:
    """Exchange with all other members at once. Each member begins with the next one, or all would turn to the same
    member."""
    me, size = group.rank(), group.size()
    works = [dist.irecv(take((me - k) % size), group=group, group_src=(me - k) % size) for k in range(1, size)]
    works += [dist.isend(give((me + k) % size), group=group, group_dst=(me + k) % size) for k in range(1, size)]
    for work in works:
        if work is not None:
            work.wait()


def shard_stage(
    module: torch.nn.Module, blocks: Sequence[torch.nn.Module], groups: MeshGroups, reached: set[int]
) -> None:
    mesh, scratch = groups.mesh("sharded"), ScratchBuffer()
    for number, block in enumerate(blocks):
        # The last block is needed again at once, for its backward pass.
        fully_shard(block, mesh=mesh, reshard_after_forward=number + 1 < len(blocks))
    fully_shard(module, mesh=mesh)
    for wrapped in module.modules():
        if isinstance(wrapped, FSDPModule):
            wrapped.set_gradient_divide_factor(1.0)  # shards' gradients are sums; the whole batch's weight divides them
            wrapped.set_force_sum_reduction_for_comms(True)
            # If only some shards use a parameter, the others add zeros; else members would add up different sets.
            wrapped.set_reduce_scatter_unused_params(True, recurse=False)
            wrapped.set_custom_all_gather(ScratchGather(scratch, groups.world.network))
            wrapped.set_custom_reduce_scatter(ScratchReduceScatter(scratch, groups.world.network))
            # By default torch gathers the next block early. With gloo that gains nothing and takes memory.
            wrapped.set_modules_to_backward_prefetch([wrapped])
            for group in wrapped._get_fsdp_state()._fsdp_param_groups:
                _note_reached(group, reached)


def _note_reached(group: Any, reached: set[int]) -> None:
    """Note which parameters got a gradient from this member's shards. The zeros do not count: the optimizer must leave
    untouched parameters alone."""
    post_backward = group.post_backward

    def noting(*unused: Any) -> None:
        for one in group.fsdp_params:
            if hasattr(one, "_unsharded_param") and one.unsharded_param.grad is not None:
                reached.add(id(one.sharded_param))
        post_backward(*unused)

    group.post_backward = noting


def gathered_blocks(module: torch.nn.Module, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yields the elements of the model's lists and sequences of modules: each is gathered when needed and freed
    afterwards."""
    total = sum(p.numel() for p in module.parameters())
    present = {id(one) for one in module.modules()}
    users: dict[int, int] = {}
    for one in module.modules():
        for parameter in one._parameters.values():
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    taken: set[int] = set()
    for container in model.modules():
        if isinstance(container, torch.nn.ModuleList | torch.nn.Sequential) and id(container) not in taken:
            for element in container:
                parameters = list(element.parameters())
                shared = any(users.get(id(p), 0) > 1 for p in parameters)  # a module outside of the block uses it too
                large = sum(p.numel() for p in parameters) >= total * _SMALLEST_BLOCK
                if id(element) in present and id(element) not in taken and large and not shared:
                    taken.update(id(one) for one in element.modules())
                    yield element
