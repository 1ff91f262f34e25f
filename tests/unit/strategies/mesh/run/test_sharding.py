"""Gathering and adding up against plain arithmetic, with real members over gloo."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from distbelief.strategies.mesh.run.modelpart import ScratchBuffer, ScratchReduceScatter, mapped
from tests.support.mesh.sharding import whole
from tests.support.stage import Stage

MEMBER = "tests.support.mesh.sharding"


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (3, torch.float32), (4, torch.int64)])
def test_everybody_gets_all_pieces_and_the_sum_of_its_own(stage: Stage, size: int, dtype: torch.dtype) -> None:
    lengths = [5, 300_000, 1]  # one of them is memory of its own, outside of the heap
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    same = {"port": store.port, "size": size, "lengths": lengths, "dtype": dtype}
    members = stage.play(MEMBER, "exchange", [{"rank": rank, **same} for rank in range(size)])
    for number, length in enumerate([*lengths, *lengths]):
        brought = [whole(rank, size, length, dtype) for rank in range(size)]
        for rank, found in enumerate(members):
            gathered, total, buffers = found[number]
            assert torch.equal(gathered, torch.cat([one[:length] for one in brought]))
            expected = sum(one[rank * length : (rank + 1) * length] for one in brought)
            assert torch.equal(total, expected)  # in the order of the members
            assert buffers == 1


def test_a_scratch_grows_to_the_longest_and_is_used_again() -> None:
    scratch = ScratchBuffer()
    scratch.take(10, torch.float32)
    longest = scratch.take(300_000, torch.float32)
    assert scratch.take(20, torch.int64).data_ptr() == longest.data_ptr()
    assert scratch.take(300_000, torch.float32).shape == (300_000,)


@pytest.mark.parametrize("count", [0, 3, 1 << 20])
def test_mapped_memory_is_ordinary_memory(count: int) -> None:
    one, other = mapped(count, torch.float32), mapped(count, torch.float32)
    one.fill_(1.0)
    other.fill_(2.0)
    assert float(one.sum()) == count


def test_a_sum_into_its_own_pieces_is_refused() -> None:
    pieces = torch.zeros(4)
    with pytest.raises(RuntimeError, match="another order"):
        ScratchReduceScatter(ScratchBuffer(), nullcontext)(pieces[:2], pieces, None, dist.ReduceOp.SUM)  # type: ignore[arg-type]
