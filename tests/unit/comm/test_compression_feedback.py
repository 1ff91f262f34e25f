"""Error feedback: nothing is lost for good, so training with few bytes gets to where it would have."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from distbelief.compression.feedback import Feedback
from distbelief.compression.spec import parse_codec
from distbelief.errors import DistBeliefError

TEXTS = ["bf16", "int8:block=256", "topk:0.01"]
STEPS = 400


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small matrices on a busy machine: several threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gradients(length: int = 1000) -> list[Tensor]:
    """Noise about a mean whose elements have very different sizes: top-k alone would never send the small ones."""
    random = torch.Generator().manual_seed(5)
    mean = torch.linspace(0.01, 1.0, length)
    return [mean * (1 + 0.3 * torch.randn(length, generator=random)) for _ in range(STEPS)]


def decoded_sum(text: str, vectors: list[Tensor], feedback: bool) -> Tensor:
    codec = parse_codec(text)
    keeper = Feedback(codec)
    total = torch.zeros_like(vectors[0], dtype=torch.float64)
    for vector in vectors:
        sent = keeper.encode("w", vector) if feedback else codec.encode(vector)
        total += codec.decode(sent.header, sent.frames)
    return total


def off_by(total: Tensor, vectors: list[Tensor]) -> float:
    wanted = torch.stack(vectors).double().sum(0)
    return float((total - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("text", "bound"), [("bf16", 1e-4), ("int8:block=256", 1e-4), ("topk:0.01", 0.25)])
def test_the_sum_of_what_was_sent_approaches_the_sum_of_the_originals(text: str, bound: float) -> None:
    vectors = gradients()
    early = off_by(decoded_sum(text, vectors[:100], True), vectors[:100])
    late = off_by(decoded_sum(text, vectors, True), vectors)
    assert late < bound
    assert late < early / 2, "the difference is one residual, however many steps there were"


def test_top_k_alone_never_sends_most_of_it() -> None:
    vectors = gradients()
    assert off_by(decoded_sum("topk:0.01", vectors, False), vectors) > 0.9


@pytest.mark.parametrize("text", TEXTS)
def test_what_was_sent_and_what_is_kept_make_the_whole(text: str) -> None:
    vectors = gradients()[:50]
    keeper = Feedback(parse_codec(text))
    total = torch.zeros(1000, dtype=torch.float64)
    for vector in vectors:
        before = vector.clone()
        sent = keeper.encode("w", vector)
        assert torch.equal(vector, before)
        total += keeper.codec.decode(sent.header, sent.frames)
    rest = torch.zeros(1000)
    keeper.release("w", rest)
    wanted = torch.stack(vectors).double().sum(0)
    torch.testing.assert_close(total + rest, wanted, rtol=1e-5, atol=1e-5)
    assert keeper.state() == {}
    keeper.release("w", rest.clone())  # nothing is left, and nothing happens


@pytest.mark.parametrize("text", ["bf16", "int8:block=8", "topk:0.1", "topk:0.02"])
def test_least_squares_converges(text: str) -> None:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 50, generator=random)
    truth = torch.randn(50, generator=random)
    targets = inputs @ truth
    weights = torch.zeros(50)
    keeper = Feedback(parse_codec(text))
    for _ in range(3000):
        gradient = inputs.T @ (inputs @ weights - targets) / 200
        sent = keeper.encode("w", gradient)
        weights -= 0.02 * keeper.codec.decode(sent.header, sent.frames)
    assert float((weights - truth).norm() / truth.norm()) < 1e-3


@pytest.mark.parametrize("text", TEXTS)
def test_a_run_goes_on_from_saved_residuals_with_the_same_bits(text: str) -> None:
    vectors = gradients()[:20]
    one, before = Feedback(parse_codec(text)), Feedback(parse_codec(text))
    for vector in vectors[:10]:
        one.encode("w", vector)
        before.encode("w", vector)
    saved = before.state()
    before.encode("w", vectors[0])  # what happens after saving does not change what was saved
    after = Feedback(parse_codec(text))
    after.encode("other", vectors[0])
    after.load(saved)
    assert list(after.state()) == ["w"]
    for vector in vectors[10:]:
        wanted, got = one.encode("w", vector), after.encode("w", vector)
        assert all(torch.equal(a, b) for a, b in zip(wanted.frames, got.frames, strict=True))


@pytest.mark.parametrize("text", [*TEXTS, "topk:0.5"])
@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("many", [1, 1000])
def test_a_broken_step_is_seen_once_and_does_not_break_the_next(text: str, odd: float, many: int) -> None:
    keeper = Feedback(parse_codec(text))
    broken = gradients()[0]
    broken[:many] = odd
    sent = keeper.encode("w", broken)
    assert not keeper.codec.decode(sent.header, sent.frames).isfinite().all()
    sent = keeper.encode("w", gradients()[1])
    assert keeper.codec.decode(sent.header, sent.frames).isfinite().all()


def test_names_are_apart_and_lengths_must_stay() -> None:
    keeper = Feedback(parse_codec("topk:0.5"))
    keeper.encode("a", torch.tensor([2.0, 1.0]))
    sent = keeper.encode("b", torch.tensor([0.0, 0.0, 0.0]))
    assert sent.size_bytes == 0
    assert {name: residual.tolist() for name, residual in keeper.state().items()} == {"a": [0.0, 1.0], "b": [0.0] * 3}
    with pytest.raises(DistBeliefError, match="has 3 elements, and had 2"):
        keeper.encode("a", torch.zeros(3))
    with pytest.raises(DistBeliefError, match="has 3 elements"):
        keeper.release("a", torch.zeros(3))
