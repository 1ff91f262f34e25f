"""Error feedback (`Codec.encode_keeping`): what an encoding loses goes with the next vector, so it is not lost."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from distbelief.compression.codec import Codec, Encoded
from distbelief.compression.methods import codec_of

TEXTS = ["bf16", "int8=256", "topk=0.01"]
STEPS = 400


class Feedback:
    """One vector's residual beside its codec, as the exchanges keep them."""

    def __init__(self, codec: Codec, length: int = 1000) -> None:
        self.codec = codec
        self.rest = torch.zeros(length)

    def encode(self, vector: Tensor) -> Encoded:
        return self.codec.encode_keeping(self.rest, vector)


def gradients(length: int = 1000) -> list[Tensor]:
    """Noise about a mean whose elements have very different sizes: top-k alone would never send the small ones."""
    random = torch.Generator().manual_seed(5)
    mean = torch.linspace(0.01, 1.0, length)
    return [mean * (1 + 0.3 * torch.randn(length, generator=random)) for _ in range(STEPS)]


def decoded_sum(text: str, vectors: list[Tensor], feedback: bool) -> Tensor:
    codec = codec_of(text)
    keeper = Feedback(codec)
    total = torch.zeros_like(vectors[0], dtype=torch.float64)
    for vector in vectors:
        sent = keeper.encode(vector) if feedback else codec.encode(vector)
        total += codec.decode(sent.header, sent.frames)
    return total


def off_by(total: Tensor, vectors: list[Tensor]) -> float:
    wanted = torch.stack(vectors).double().sum(0)
    return float((total - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("text", "bound"), [("bf16", 1e-4), ("int8=256", 1e-4), ("topk=0.01", 0.25)])
def test_the_sum_of_what_was_sent_approaches_the_sum_of_the_originals(text: str, bound: float) -> None:
    vectors = gradients()
    early = off_by(decoded_sum(text, vectors[:100], True), vectors[:100])
    late = off_by(decoded_sum(text, vectors, True), vectors)
    assert late < bound
    assert late < early / 2, "the difference is one residual, however many steps there were"


def test_top_k_alone_never_sends_most_of_it() -> None:
    vectors = gradients()
    assert off_by(decoded_sum("topk=0.01", vectors, False), vectors) > 0.9


@pytest.mark.parametrize("text", TEXTS)
def test_what_was_sent_and_what_is_kept_make_the_whole(text: str) -> None:
    vectors = gradients()[:50]
    keeper = Feedback(codec_of(text))
    total = torch.zeros(1000, dtype=torch.float64)
    for vector in vectors:
        before = vector.clone()
        sent = keeper.encode(vector)
        assert torch.equal(vector, before)
        total += keeper.codec.decode(sent.header, sent.frames)
    wanted = torch.stack(vectors).double().sum(0)
    torch.testing.assert_close(total + keeper.rest, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", ["bf16", "int8=8", "topk=0.1", "topk=0.02"])
def test_least_squares_converges(text: str) -> None:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 50, generator=random)
    truth = torch.randn(50, generator=random)
    targets = inputs @ truth
    weights = torch.zeros(50)
    keeper = Feedback(codec_of(text), 50)
    for _ in range(3000):
        gradient = inputs.T @ (inputs @ weights - targets) / 200
        sent = keeper.encode(gradient)
        weights -= 0.02 * keeper.codec.decode(sent.header, sent.frames)
    assert float((weights - truth).norm() / truth.norm()) < 1e-3


@pytest.mark.parametrize("text", TEXTS)
def test_a_run_goes_on_from_a_saved_residual_with_the_same_bits(text: str) -> None:
    vectors = gradients()[:20]
    one, after = Feedback(codec_of(text)), Feedback(codec_of(text))
    for vector in vectors[:10]:
        one.encode(vector)
    after.rest = one.rest.clone()
    for vector in vectors[10:]:
        wanted, got = one.encode(vector), after.encode(vector)
        assert all(torch.equal(a, b) for a, b in zip(wanted.frames, got.frames, strict=True))


@pytest.mark.parametrize("text", [*TEXTS, "topk=0.5"])
@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("many", [1, 1000])
def test_a_broken_step_is_seen_once_and_does_not_break_the_next(text: str, odd: float, many: int) -> None:
    keeper = Feedback(codec_of(text))
    broken = gradients()[0]
    broken[:many] = odd
    sent = keeper.encode(broken)
    assert not keeper.codec.decode(sent.header, sent.frames).isfinite().all()
    sent = keeper.encode(gradients()[1])
    assert keeper.codec.decode(sent.header, sent.frames).isfinite().all()
