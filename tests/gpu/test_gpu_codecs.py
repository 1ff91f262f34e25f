"""Codecs on a CUDA device: the bytes, the sums and the rests of the host's own way."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from distbelief.compression import block
from distbelief.compression.codec import Codec
from distbelief.compression.methods import codec_of
from distbelief.compression.powersgd import LowRank

TEXTS = ["bf16", "int8", "int8=8", "topk=0.01", "topk=0.5"]
LENGTHS = [1, 7, 1000, 1024, 1025, 1 << 18]
ODD = [0.0, -0.0, 1.0, -1.0, 2.5, 1e-40, -1e-45, 2.0**-126, 3.4028234663852886e38, math.inf, -math.inf, math.nan]


def same(one: Tensor, two: Tensor) -> bool:
    """The same bits, but for those of a NaN."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    differ = one.contiguous().view(kind) != two.contiguous().view(kind)
    return not bool((differ & ~(one.isnan() & two.isnan())).any())


def some(rows: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    sizes = torch.randn(2, rows, length, generator=generator).mul_(3).exp_()
    rests, vectors = sizes * torch.randn(2, rows, length, generator=generator)
    vectors[0] = vectors[0].sign()  # many of one magnitude
    rests[0] = 0.0
    vectors[1, : length // 2] = 0.0
    rests[1, : length // 2] = 0.0
    odd = torch.tensor(ODD).repeat(length // len(ODD) + 1)[:length]
    vectors[2] = odd
    vectors[3, length // 3] = math.nan
    return rests, vectors


def coded(codec: Codec, rests: Tensor, vectors: Tensor) -> Tensor:
    blocks = torch.zeros(len(vectors), block.size_bytes(codec, vectors.shape[1]), dtype=torch.uint8)
    for rest, vector, content in zip(rests, vectors, blocks, strict=True):
        block.write(codec, rest, vector, content)
    return blocks


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_device_codes_as_the_host_does(text: str, length: int) -> None:
    codec = codec_of(text)
    rests, vectors = some(6, length)
    on_device, given = rests.cuda(), vectors.cuda()
    expected = coded(codec, rests, vectors)
    blocks = torch.zeros(*expected.shape, dtype=torch.uint8, device="cuda")
    block.write_rows(codec, on_device, given, blocks)
    assert same(on_device.cpu(), rests)
    frames, wanted = block._frames(codec, length, blocks.cpu()), block._frames(codec, length, expected)
    heads = block._heads(expected, len(wanted))
    assert torch.equal(block._heads(blocks.cpu(), len(frames)), heads)
    for at in range(len(frames)):
        for row, count in enumerate(heads[:, at].tolist()):
            assert same(frames[at][row, :count], wanted[at][row, :count]), (at, row)
    plain, out = torch.empty_like(vectors), torch.empty_like(given)
    for content, one in zip(expected, plain, strict=True):
        block.read(codec, content, one)
    block.read_rows(codec, expected.cuda(), out)
    assert same(out.cpu(), plain)


def test_low_ranks_are_near_those_of_the_host() -> None:
    """Not the same: a device multiplies in another order."""
    shapes = [(300, 200), (200,), (64, 3, 5, 5)]
    host, device = (LowRank(4).over(shapes, seed=3, device=one) for one in (None, torch.device("cuda")))
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        given = [torch.randn(shape, generator=generator) for shape in shapes]
        sums = host.reduce(given, lambda vector: vector.mul_(2))
        found = device.reduce([one.cuda() for one in given], lambda vector: vector.mul_(2))
        for one, two in zip(sums, found, strict=True):
            assert torch.allclose(one, two.cpu(), atol=1e-3 * float(one.abs().max()))
