"""A member of a group that gathers and adds up with its own exchanges. Runs in processes of the stage."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist

from distbelief.strategies.mesh.run.modelpart import ScratchBuffer, ScratchGather, ScratchReduceScatter
from distbelief.transport.shm.segment import SegmentClient

CPU = torch.device("cpu")


def whole(rank: int, size: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """What a member brings: `length` numbers for each of them."""
    values = torch.rand(size * length, generator=torch.Generator().manual_seed(rank)) - 0.5
    return (values * 1000).to(dtype)


def exchange(
    segments: SegmentClient, rank: int, port: int, size: int, lengths: list[int], dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """As FSDP does it, twice for each length: everybody's first piece, my sum; how much memory both have taken."""
    store = dist.TCPStore("127.0.0.1", port, size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    group, scratch = dist.group.WORLD, ScratchBuffer()
    assert group is not None
    gather, add_up = ScratchGather(scratch, nullcontext), ScratchReduceScatter(scratch, nullcontext)
    found = []
    for length in [*lengths, *lengths]:
        mine = whole(rank, size, length, dtype)
        output = gather.allocate((length * size,), dtype=dtype, device=CPU)
        own = output[rank * length : (rank + 1) * length]
        own.copy_(mine[:length])
        gather(output, own, group)
        gathered = output.clone()
        pieces = add_up.allocate((length * size,), dtype=dtype, device=CPU)
        total = add_up.allocate((length,), dtype=dtype, device=CPU)
        pieces.copy_(mine)
        add_up(total, pieces, group, dist.ReduceOp.SUM)
        found.append((gathered, total, len({output.data_ptr(), pieces.data_ptr()})))
    dist.barrier()
    dist.destroy_process_group()
    return found
