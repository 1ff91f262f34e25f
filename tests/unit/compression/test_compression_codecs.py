"""Codecs: what comes back is as near as they promise, for any length; what is not a number never becomes one."""

from __future__ import annotations

import doctest
import importlib
import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distbelief.compression.codec import CHUNK, Codec, Encoded, Header
from distbelief.compression.methods import Bf16, Int8, TopK, codec_of
from distbelief.errors import DistBeliefError

TEXTS = ["bf16", "int8", "int8=8", "topk=0.01", "topk=0.5"]
LENGTHS = [0, 1, 7, 1000, 1024, 1025, CHUNK - 1, CHUNK, 2 * CHUNK + 4097]
MODULES = ["codec", "methods", "option", "powersgd", "switch"]


def some(length: int, seed: int = 0) -> Tensor:
    """Numbers of very different sizes, as gradients are."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(length, generator=random) * torch.randn(length, generator=random).mul_(3).exp_()


def there_and_back(codec: Codec, vector: Tensor) -> Tensor:
    sent = codec.encode(vector)
    return codec.decode(sent.header, sent.frames)


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_the_docstrings_are_true(module: str) -> None:
    found = importlib.import_module(f"distbelief.compression.{module}")
    assert doctest.testmod(found).failed == 0


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_message_travels_as_bytes_and_is_decoded_by_its_header_alone(text: str, length: int) -> None:
    vector = some(length)
    before = vector.clone()
    sent = codec_of(text).encode(vector)
    assert torch.equal(vector, before), "encoding must not change the vector"
    assert all(frame.is_contiguous() for frame in sent.frames)
    header = msgspec.msgpack.decode(msgspec.msgpack.encode(sent.header), type=Header)
    wire = [bytearray(frame.view(torch.uint8).numpy().tobytes()) for frame in sent.frames]
    assert sent.size_bytes == sum(len(frame) for frame in wire)
    frames = [torch.frombuffer(f, dtype=torch.uint8) if f else torch.empty(0, dtype=torch.uint8) for f in wire]
    got = codec_of(header.codec).decode(header, frames)
    assert got.shape == vector.shape
    assert got.dtype == torch.float32
    assert torch.equal(got, there_and_back(codec_of(text), vector))


@pytest.mark.parametrize("length", LENGTHS)
def test_bf16_rounds_to_the_nearest_even(length: int) -> None:
    vector = some(length)
    bits = vector.view(torch.int32).long()
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).to(torch.int32).view(torch.float32)
    assert torch.equal(there_and_back(Bf16(), vector), rounded)
    assert ((rounded - vector).abs() <= vector.abs() * 2**-8).all()


def test_bf16_keeps_what_is_not_a_number() -> None:
    odd = torch.tensor([math.nan, math.inf, -math.inf, 3.4e38, -0.0, 1e-40] * 20)
    got = there_and_back(Bf16(), odd).view(-1, 6)
    assert got[:, 0].isnan().all()
    assert (got[:, 1] == math.inf).all()
    assert (got[:, 2] == -math.inf).all()
    assert (got[:, 3] == math.inf).all()
    assert (got[:, 4] == 0).all()
    assert got[:, 4].signbit().all()
    # the smallest NaN has no bit set in its upper half but the exponent's: cut off, it would be an infinity
    quiet = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32).repeat(64)
    assert there_and_back(Bf16(), quiet).isnan().all()


@pytest.mark.parametrize("block", [8, 1024, 5000, 1 << 20])
@pytest.mark.parametrize("length", LENGTHS)
def test_int8_is_off_by_half_a_level_of_the_block_at_most(block: int, length: int) -> None:
    vector = some(length)
    vector[::3] = 0.0
    got = there_and_back(Int8(block), vector)
    padded = torch.zeros(2, -(-length // block) * block, dtype=torch.float64)
    padded[0, :length], padded[1, :length] = vector, got
    part, back = padded.view(2, -1, block)
    half = part.abs().amax(1, keepdim=True) / 127 / 2
    assert ((part - back).abs() <= half * 1.0001).all()
    assert (got[::3] == 0).all()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(width=32), max_size=40), st.sampled_from([8, 16]))
def test_int8_never_makes_a_number_of_what_is_none(numbers: list[float], block: int) -> None:
    vector = torch.tensor(numbers, dtype=torch.float32)
    got = there_and_back(Int8(block), vector)
    for start in range(0, len(numbers), block):
        part, back = vector[start : start + block], got[start : start + block]
        if part.isfinite().all():
            half = max(float(part.abs().max()) / 127, 2.0**-126) / 2
            error = (part.double() - back.double()).abs()
            assert (error.nan_to_num(0, 0, 0) <= half * 1.0001).all()
            assert back.isfinite().all() or part.abs().max() > 3.4028e38
            assert (back[part == 0] == 0).all()
        else:
            assert back.isnan().all()


def test_int8_spoils_only_the_block_that_is_broken_and_always_in_the_same_way() -> None:
    vector = some(40)
    vector[9], vector[30] = math.nan, -math.inf
    got = there_and_back(Int8(8), vector)
    assert got.isnan().view(5, 8).all(1).tolist() == [False, True, False, True, False]
    assert not got.isnan().view(5, 8)[::2].any()
    vector[12] = 77.0  # another number beside the NaN: the message is the same, whatever the processor made of it
    again = Int8(8).encode(vector)
    assert torch.equal(again.frames[1], Int8(8).encode(vector.clone()).frames[1])
    assert (again.frames[1][8:16] == 1).all()


def test_int8_keeps_the_tiny_and_the_zero() -> None:
    assert (there_and_back(Int8(8), torch.zeros(20)) == 0).all()
    tiny = torch.tensor([1e-30, -1e-32, 1e-36, 1e-44, 0.0])
    assert ((there_and_back(Int8(8), tiny) - tiny).abs() <= 1e-30 / 127 / 2 * 1.0001).all()
    assert there_and_back(Int8(8), torch.full((8,), 1e-44)).isfinite().all()
    rest = torch.full((16,), 1e-40)
    rest[:8] = 0.0
    sent = Int8(8).encode_keeping(rest, torch.zeros(16))
    assert sent.frames[0].tolist() == [2.0**-126, 2.0**-126]
    assert (rest[:8] == 0).all()
    assert (rest[8:] - 1e-40).abs().max() <= 2.0**-127


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 1e-45, math.inf, math.nan]), max_size=60))
def test_top_k_takes_the_largest_and_of_equals_the_first(numbers: list[float]) -> None:
    vector = torch.tensor(numbers, dtype=torch.float32)
    codec = TopK(0.3)
    places, values = codec.encode(vector).frames
    sizes = [math.inf * 2 if math.isnan(n) else abs(n) for n in numbers]
    rank = sorted(range(len(numbers)), key=lambda i: (not math.isnan(numbers[i]), -sizes[i], i))
    wanted = sorted(i for i in rank[: codec.count(len(numbers))] if sizes[i] > 0)
    assert places.tolist() == wanted
    assert torch.equal(values.view(torch.int32), vector[places.long()].view(torch.int32))


@pytest.mark.parametrize("kind", ["random", "equal", "sparse", "periodic", "rising", "few sizes"])
def test_top_k_is_exact_in_long_vectors_whatever_the_sample_said(kind: str) -> None:
    length = 3 * CHUNK + 1001
    vector = {
        "random": some(length),
        "equal": torch.full((length,), -2.5),
        "sparse": torch.zeros(length).index_fill_(0, torch.tensor([5, length - 1]), 1.0),
        "periodic": torch.where(torch.arange(length) % (length // (1 << 15)) == 0, 1e-9, 1.0) * some(length).abs(),
        "rising": torch.arange(length, dtype=torch.float32),
        "few sizes": torch.randint(0, 3, (length,), generator=torch.Generator().manual_seed(1)).float(),
    }[kind]
    codec = TopK(0.01)
    places, values = codec.encode(vector).frames
    order = torch.sort(vector.abs(), descending=True, stable=True).indices[: codec.count(length)]
    wanted = order[vector[order] != 0].sort().values
    assert torch.equal(places.long(), wanted)
    assert torch.equal(values, vector[wanted])
    back = there_and_back(codec, vector)
    assert torch.equal(back[wanted], vector[wanted])
    assert int((back != 0).sum()) == len(wanted)


def test_top_k_is_exact_where_the_sample_saw_only_the_largest() -> None:
    length = 3 * CHUNK + 1001
    vector = torch.where(torch.arange(length) % (length // (1 << 15)) == 0, 1e9, 1.0) * (some(length).abs() + 1)
    codec = TopK(0.3)
    wanted = torch.sort(vector, descending=True, stable=True).indices[: codec.count(length)].sort().values
    assert torch.equal(codec.encode(vector).frames[0].long(), wanted)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_one_broken_element_among_many_is_seen_at_the_other_end(text: str, odd: float) -> None:
    vector = some(CHUNK + 500)
    vector[CHUNK + 77] = odd
    assert not there_and_back(codec_of(text), vector)[CHUNK + 77].isfinite()


@pytest.mark.parametrize(("text", "least"), [("bf16", 2.0), ("int8", 3.98), ("topk=0.01", 49.9), ("topk=0.001", 499)])
def test_frames_are_smaller_than_the_vector_by_the_method_s_factor(text: str, least: float) -> None:
    sent = codec_of(text).encode(some(1 << 17))
    assert sent.size_bytes == sum(f.numel() * f.element_size() for f in sent.frames)
    assert least <= (4 << 17) / sent.size_bytes <= least * 1.01


def test_a_vector_of_zeros_has_empty_frames() -> None:
    assert TopK(0.01).encode(torch.zeros(100)).size_bytes == 0
    assert TopK(0.01).encode(torch.zeros(0)).size_bytes == 0


def test_empty_frames_may_come_from_anywhere() -> None:
    """numpy's empty arrays become tensors that torch does not view as another type."""
    frames = [torch.from_numpy(np.empty(0, np.uint8)) for _ in range(2)]
    assert torch.equal(TopK(0.01).decode(Header("topk=0.01", 3), frames), torch.zeros(3))


@pytest.mark.parametrize("text", TEXTS)
def test_frames_and_outputs_are_used_again(text: str) -> None:
    codec = codec_of(text)
    first = codec.encode(some(5000, 1))
    wanted = codec.encode(some(5000, 2))
    again = codec.encode(some(5000, 2), reuse=first)
    assert all(torch.equal(a, b) for a, b in zip(again.frames, wanted.frames, strict=True))
    if not text.startswith("topk"):
        assert [f.data_ptr() for f in again.frames] == [f.data_ptr() for f in first.frames]
    out = torch.full((5000,), math.nan)
    assert codec.decode(again.header, again.frames, out).data_ptr() == out.data_ptr()
    assert torch.equal(out, codec.decode(wanted.header, wanted.frames))
    other = codec.encode(some(77), reuse=again)  # of another length: not used
    assert other.header.length == 77
    assert torch.equal(codec.decode(other.header, other.frames), there_and_back(codec, some(77)))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("length", LENGTHS)
def test_what_encoding_lost_is_the_difference(text: str, length: int) -> None:
    codec = codec_of(text)
    vector, before = some(length), some(length, seed=1)
    rest = before.clone()
    sent = codec.encode_keeping(rest, vector)
    assert torch.equal(vector, some(length))
    wanted = codec.encode(before + vector)
    assert all(torch.equal(a, b) for a, b in zip(sent.frames, wanted.frames, strict=True))
    assert torch.equal(rest, before + vector - codec.decode(sent.header, sent.frames))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(4, dtype=torch.float64),
        torch.zeros(4, dtype=torch.bfloat16),
        torch.zeros(2, 2),
        torch.zeros(8)[::2],
        torch.zeros(4, device="meta"),
    ],
)
def test_what_is_no_flat_float32_vector_is_refused(text: str, wrong: Tensor) -> None:
    with pytest.raises(DistBeliefError, match="only") as caught:
        codec_of(text).encode(wrong)
    assert caught.value.hint
    sent = codec_of(text).encode(torch.ones(4))
    with pytest.raises(DistBeliefError, match="only"):
        codec_of(text).decode(sent.header, sent.frames, out=wrong)


@pytest.mark.parametrize("text", TEXTS)
def test_a_vector_of_a_model_is_encoded_without_its_graph(text: str) -> None:
    sent = codec_of(text).encode(torch.nn.Parameter(some(100)))
    assert not any(frame.requires_grad for frame in sent.frames)
    out = torch.zeros(100, requires_grad=True)
    assert torch.equal(codec_of(text).decode(sent.header, sent.frames, out), there_and_back(codec_of(text), some(100)))


def damaged(sent: Encoded) -> list[tuple[Header, list[Tensor]]]:
    header, frames = sent.header, sent.frames
    return [
        (header, frames[:-1]),
        (header, [*frames, frames[0]]),
        (header, [*frames[:-1], frames[-1].view(torch.uint8)[:-1]]),
        (msgspec.structs.replace(header, length=-1), frames),
        (msgspec.structs.replace(header, codec="topk=0.25"), frames),
        (msgspec.structs.replace(header, codec="zip"), frames),
        (msgspec.structs.replace(header, codec="powersgd=2"), frames),
    ]


@pytest.mark.parametrize("text", TEXTS)
def test_damaged_messages_are_refused(text: str) -> None:
    codec = codec_of(text)
    for header, frames in damaged(codec.encode(some(100))):
        with pytest.raises(DistBeliefError):
            codec.decode(header, frames)
    sent = codec.encode(some(100))
    with pytest.raises(DistBeliefError, match="cannot be decoded to one of 99"):
        codec.decode(sent.header, sent.frames, torch.zeros(99))


@pytest.mark.parametrize("place", [-1, 100, 2**31 - 1])
def test_top_k_does_not_write_outside_of_the_vector(place: int) -> None:
    header = Header("topk=0.01", 100)
    with pytest.raises(DistBeliefError, match="outside"):
        TopK(0.01).decode(header, [torch.tensor([place], dtype=torch.int32), torch.ones(1)])
