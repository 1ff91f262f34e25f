"""Many vectors at a time, as a device codes them: the same bytes and the same rests as one by one on the host.

The operations are those of a device, run on the host's tensors. On real devices: tests/gpu/test_gpu_codecs.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distbelief.compression import block
from distbelief.compression.codec import Codec
from distbelief.compression.methods import Bf16, Int8, TopK

CODECS: list[Codec] = [Bf16(), Int8(8), Int8(1024), TopK(0.01), TopK(0.5)]
LARGEST = torch.finfo(torch.float32).max
ODD = [0.0, -0.0, 1.0, -1.0, 2.5, 1e-40, -1e-45, 1e-38, 2.0**-126, LARGEST, -LARGEST, math.inf, -math.inf, math.nan]
STALE = 0xAB  # of an earlier message

codecs = st.sampled_from(CODECS)


def same(one: Tensor, two: Tensor) -> bool:
    """The same bits, but for those of a NaN."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    differ = one.contiguous().view(kind) != two.contiguous().view(kind)
    return one.dtype == two.dtype and not bool((differ & ~(one.isnan() & two.isnan())).any())


def one_by_one(codec: Codec, rests: Tensor, vectors: Tensor) -> Tensor:
    blocks = torch.full((len(vectors), block.size_bytes(codec, vectors.shape[1])), STALE, dtype=torch.uint8)
    for rest, vector, content in zip(rests, vectors, blocks, strict=True):
        block.write(codec, rest, vector, content)
    return blocks


def check(codec: Codec, rests: Tensor, vectors: Tensor) -> None:
    expected_rests, given_vectors = rests.clone(), vectors.clone()
    expected = one_by_one(codec, expected_rests, vectors)
    stride = expected.shape[1] + 64  # rows need not lie side by side
    blocks = torch.full((len(vectors), stride), STALE, dtype=torch.uint8)
    block.write_rows(codec, rests, vectors, blocks)
    assert torch.equal(vectors.view(torch.int32), given_vectors.view(torch.int32)), "the vectors are not mine to change"
    assert same(rests, expected_rests)
    room = block._frames(codec, vectors.shape[1], expected)
    heads = block._heads(expected, len(room))
    assert torch.equal(block._heads(blocks, len(room)), heads)
    for at, (found, wanted) in enumerate(zip(block._frames(codec, vectors.shape[1], blocks), room, strict=True)):
        for row, count in enumerate(heads[:, at].tolist()):
            assert same(found[row, :count], wanted[row, :count])
    plain, out, crossed = (torch.ones_like(vectors) for _ in range(3))
    for content, one in zip(expected, plain, strict=True):
        block.read(codec, content, one)
    block.read_rows(codec, expected, out)
    block.read_rows(codec, blocks, crossed)
    assert same(out, plain)
    assert same(crossed, plain)


def some(rows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(2, rows, length, generator=generator).mul_(3).exp_()
    rests, vectors = sizes * torch.randn(2, rows, length, generator=generator)
    idle = torch.rand(rows, length, generator=generator) < 0.3
    return rests.masked_fill(idle, 0.0), vectors.masked_fill(idle, 0.0)


@settings(max_examples=60, deadline=None)
@given(codecs, st.integers(1, 4), st.integers(1, 3000), st.integers(0, 2**31))
def test_numbers_of_any_size(codec: Codec, rows: int, length: int, seed: int) -> None:
    check(codec, *some(rows, length, seed))


@settings(max_examples=100, deadline=None)
@given(codecs, st.integers(1, 3), st.data())
def test_what_is_odd(codec: Codec, rows: int, data: st.DataObject) -> None:
    """Zeros, equal magnitudes, subnormal numbers, the largest ones, and what is no number."""
    length = data.draw(st.integers(1, 40))
    numbers = st.lists(st.sampled_from(ODD), min_size=rows * length, max_size=rows * length)
    rests = torch.tensor(data.draw(numbers)).nan_to_num_(0.0, 0.0, 0.0).clamp_(-1.0, 1.0)
    check(codec, rests.view(rows, length), torch.tensor(data.draw(numbers)).view(rows, length))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_none_and_nothing(codec: Codec) -> None:
    check(codec, torch.zeros(3, 0), torch.zeros(3, 0))
    check(codec, torch.zeros(3, 100), torch.zeros(3, 100))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_tile(codec: Codec) -> None:
    check(codec, *some(2, 1 << 18, 7))


def test_the_largest_number_leaves_nothing_behind_that_is_none() -> None:
    for codec in CODECS:
        rest = torch.zeros(16)
        codec.encode_keeping(rest, torch.full((16,), LARGEST))
        assert rest.isfinite().all(), codec


@pytest.mark.parametrize("place", [-1, 8, 2**31 - 1, -(2**31)])
def test_a_place_outside_of_the_vector_makes_a_nan(place: int) -> None:
    codec, vectors = TopK(0.25), torch.arange(1.0, 9.0).view(1, 8)
    blocks = one_by_one(codec, torch.zeros(1, 8), vectors)
    block._frames(codec, 8, blocks)[0][0, 1] = place
    out = torch.empty(1, 8)
    block.read_rows(codec, blocks, out)
    assert out.isnan().any()
