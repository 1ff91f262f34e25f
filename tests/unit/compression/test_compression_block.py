"""An encoded vector as a block of bytes: as many as promised, and what comes out is what the codec makes of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distbelief.compression import block
from distbelief.compression.codec import Codec
from distbelief.compression.methods import Bf16, Int8, TopK
from distbelief.errors import DistBeliefError

codecs = st.sampled_from([Bf16(), Int8(8), Int8(1024), TopK(0.01), TopK(0.5)])


@given(codecs, st.integers(1, 3000), st.integers(0, 2**31))
def test_a_block_says_what_the_codec_says(codec: Codec, length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    vector, rest = torch.randn(2, length, generator=generator)
    vector[torch.rand(length, generator=generator) < 0.3] = 0.0
    expected_rest = rest.clone()
    sent = codec.encode_keeping(expected_rest, vector)
    expected = codec.decode(sent.header, sent.frames)
    content = torch.full((block.size_bytes(codec, length),), 0xAB, dtype=torch.uint8)  # of an earlier message
    block.write(codec, rest, vector, content)
    out = torch.empty(length)
    block.read(codec, content.clone(), out)
    assert torch.equal(out, expected)
    assert torch.equal(rest, expected_rest)


def test_a_vector_of_zeros_is_zeros_again() -> None:
    content = torch.full((block.size_bytes(TopK(0.5), 9),), 0xAB, dtype=torch.uint8)
    block.write(TopK(0.5), torch.zeros(9), torch.zeros(9), content)
    out = torch.ones(9)
    block.read(TopK(0.5), content, out)
    assert not out.any()


def test_a_block_that_was_mixed_up_is_refused() -> None:
    content = torch.full((block.size_bytes(TopK(0.1), 100),), 0xAB, dtype=torch.uint8)
    with pytest.raises(DistBeliefError, match="says that its frames have"):
        block.read(TopK(0.1), content, torch.empty(100))
