"""Gathering and adding up among the members that divide one model: from memory to memory, through one buffer.

gloo's own reduce-scatter takes, measured, several times the memory of a block, and as long as an all-reduce of all of
it. And a block's messages are long: memory that is taken and let go for each of them is either cleared by the system
every time, or leaves holes that the next one does not fit into.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

_SMALLEST_MAPPING_BYTES = 1 << 20

Network = Callable[[], AbstractContextManager[None]]
"""What to do all waiting in: see `TorchGroup.network`."""


class Scratch:
    """One piece of memory for message after message: as long as the longest so far, and never let go."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Whoever took it before has no use for it any more."""
        size_bytes = count * dtype.itemsize
        if self._memory.numel() < size_bytes:
            self._memory = mapped(size_bytes, torch.uint8)
        return self._memory[:size_bytes].view(dtype)


class Gather(AllGather):
    """Everybody's piece, to everybody."""

    def __init__(self, scratch: Scratch, network: Network) -> None:
        self._scratch = scratch
        self._network = network

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._scratch.take(_count(size), dtype)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """`input_tensor` is my piece of `output_tensor`."""
        with self._network():
            _exchange(group, lambda _: input_tensor, output_tensor.chunk(group.size()).__getitem__)


class SumOfPieces(ReduceScatter):
    """Everybody's piece number k, on member k: added up in the order of the members."""

    def __init__(self, scratch: Scratch, network: Network) -> None:
        self._scratch = scratch
        self._network = network
        self._has_input = False

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """For the pieces, which are of no use afterwards; then for the sum, which stays until the end of the step."""
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
    """Memory that lies outside of the heap, if it is long: what stays for a while leaves no holes there later."""
    size_bytes = count * dtype.itemsize
    if size_bytes < _SMALLEST_MAPPING_BYTES:
        return torch.empty(count, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=dtype)


def _count(size: Sequence[int | torch.SymInt]) -> int:
    return math.prod(int(length) for length in size)


def _exchange(
    group: dist.ProcessGroup, give: Callable[[int], torch.Tensor], take: Callable[[int], torch.Tensor]
) -> None:
    """With all others at once, the next one first: else all of them would turn to the same one."""
    me, size = group.rank(), group.size()
    works = [dist.irecv(take((me - k) % size), group=group, group_src=(me - k) % size) for k in range(1, size)]
    works += [dist.isend(give((me + k) % size), group=group, group_dst=(me + k) % size) for k in range(1, size)]
    for work in works:
        if work is not None:
            work.wait()
