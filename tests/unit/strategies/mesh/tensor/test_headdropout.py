"""The masks of divided values against torch's own: the same bits, and the generator in the same place afterwards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from distbelief.strategies.mesh.tensor.apply import DropoutMasks, whole_masks
from distbelief.strategies.mesh.tensor.search import DropoutSite

SITE = DropoutSite(1, (0, 1, 2, 3), "out")


def parts(compute: Callable[[int], torch.Tensor], dim: int, degree: int, site: DropoutSite) -> torch.Tensor:
    """What the members of a group give, one after the other from the same seed, put together."""
    given, states = [], []
    for rank in range(degree):
        masks = DropoutMasks({("layer", 0): site}, degree, rank)
        torch.manual_seed(4)
        with whole_masks(masks):
            masks.called("layer")
            given.append(compute(rank))
        masks.end("out", training=True)
        states.append(torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)
    return torch.cat(given, dim)


@contextmanager
def from_the_same_seed() -> Iterator[None]:
    """Checks that the generator ends where `parts` had left it."""
    end = torch.get_rng_state()
    torch.manual_seed(4)
    yield
    assert torch.equal(torch.get_rng_state(), end)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": random(1, 1, 9, 9)},
        {"attn_mask": torch.ones(9, 9, dtype=torch.bool).tril(-1)},  # the first row sees nothing
    ],
)
def test_attention(degree: int, dtype: torch.dtype, more: dict[str, Any]) -> None:
    q, k, v = random(3, 3, 4, 9, 8).to(dtype).unbind()
    more = {
        name: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in more.items()
    }

    def mine(rank: int) -> torch.Tensor:
        heads = slice(rank * 4 // degree, (rank + 1) * 4 // degree)
        return F.scaled_dot_product_attention(q[:, heads], k[:, heads], v[:, heads], dropout_p=0.3, **more)

    result = parts(mine, 1, degree, SITE)
    with from_the_same_seed():
        expected = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, **more)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected)


def test_the_mask_of_attention_is_torchs_own_bit_by_bit() -> None:
    """With equal scores, and unit vectors as values, the output is the mask."""
    length = 16
    q, v = torch.zeros(2, 4, length, 8), torch.eye(length).expand(2, 4, length, length)

    def mine(rank: int) -> torch.Tensor:
        heads = slice(2 * rank, 2 * rank + 2)
        return F.scaled_dot_product_attention(q[:, heads], q[:, heads], v[:, heads], dropout_p=0.5)

    result = parts(mine, 1, 2, SITE)
    with from_the_same_seed():
        expected = F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)
    assert torch.equal(result, expected)
    assert 0.4 < (result == 0).float().mean() < 0.6


def test_attention_with_grouped_queries_and_its_gradients() -> None:
    q, k, v = random(2, 8, 5, 4), random(2, 4, 5, 4), random(2, 4, 5, 4)
    for x in (q, k, v):
        x.requires_grad_()

    def mine(rank: int) -> torch.Tensor:
        ours, theirs = slice(4 * rank, 4 * rank + 4), slice(2 * rank, 2 * rank + 2)
        return F.scaled_dot_product_attention(q[:, ours], k[:, theirs], v[:, theirs], dropout_p=0.3, enable_gqa=True)

    result = torch.autograd.grad(parts(mine, 1, 2, SITE).square().sum(), (q, k, v))
    with from_the_same_seed():
        whole = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, enable_gqa=True)
    torch.testing.assert_close(result, torch.autograd.grad(whole.square().sum(), (q, k, v)))


def test_attention_under_autocast() -> None:
    q, k, v = random(3, 2, 4, 9, 8).unbind()

    def mine(rank: int) -> torch.Tensor:
        heads = slice(2 * rank, 2 * rank + 2)
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(q[:, heads], k[:, heads], v[:, heads], dropout_p=0.3)

    result = parts(mine, 1, 2, SITE)
    with from_the_same_seed(), torch.autocast("cpu", torch.bfloat16):
        expected = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    assert result.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1), (1, 0, 2)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_dropout_in_any_layout_of_memory(dim: int, order: tuple[int, ...], inplace: bool) -> None:
    whole = torch.empty_permuted((4, 6, 8), order).copy_(random(4, 6, 8))
    size = whole.shape[dim] // 2

    def mine(rank: int) -> torch.Tensor:
        return F.dropout(whole.narrow(dim, rank * size, size).clone(), 0.4, True, inplace)

    result = parts(mine, dim, 2, DropoutSite(dim, order, "out"))
    with from_the_same_seed():
        expected = F.dropout(whole, 0.4, True)
    assert torch.equal(result, expected)


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.4, False), (1.0, True)])
def test_dropout_that_draws_nothing(p: float, training: bool) -> None:
    whole = random(4, 6)
    result = parts(
        lambda rank: F.dropout(whole[:, 3 * rank : 3 * rank + 3], p, training), 1, 2, DropoutSite(1, (0, 1), "out")
    )
    with from_the_same_seed():
        expected = F.dropout(whole, p, training)
    assert torch.equal(result, expected)


def test_other_dropout_is_left_alone() -> None:
    masks = DropoutMasks({("layer", 1): DropoutSite(1, (0, 1), "out")}, 2, 0)
    whole = random(4, 6)
    torch.manual_seed(4)
    with whole_masks(masks):
        masks.called("layer")
        result = F.dropout(whole, 0.4)
    with from_the_same_seed():
        expected = F.dropout(whole, 0.4)
    assert torch.equal(result, expected)


def test_a_place_that_is_missed_is_an_error() -> None:
    masks = DropoutMasks({("layer", 0): DropoutSite(1, (0, 1), "out")}, 2, 0)
    masks.called("layer")
    F.dropout(random(4, 3), 0.4)
    with pytest.raises(RuntimeError, match="between layer and out ran outside of whole_masks"):
        masks.end("out", training=True)
    masks.end("out", training=False)


def test_entered_twice_it_counts_once() -> None:
    masks = DropoutMasks({("layer", 1): DropoutSite(1, (0, 1), "out")}, 2, 0)
    with whole_masks(masks), whole_masks(masks):
        masks.called("layer")
        F.dropout(random(4, 6), 0.4)
        F.dropout(random(4, 3), 0.4)
    masks.end("out", training=True)
    with whole_masks(masks):
        assert masks.next_site() is None
