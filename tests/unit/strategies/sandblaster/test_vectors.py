"""Vectors in slices: the same bits wherever the cuts are, and the sums are right."""

from __future__ import annotations

import doctest
import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distbelief.errors import DistBeliefError
from distbelief.shards import Range, split
from distbelief.strategies.sandblaster import vectors as module
from distbelief.strategies.sandblaster.vectors import BLOCK, JoinedVectors, SlicedVectors, add_partials

patient = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


def ranges(size: int, cuts: list[int]) -> list[Range]:
    edges = [0, *sorted({cut * BLOCK for cut in cuts if 0 < cut * BLOCK < size}), size]
    return list(itertools.pairwise(edges))


def spread(values: dict[str, torch.Tensor], slices: list[Range], servers: int) -> JoinedVectors:
    """The vectors in these slices, dealt out to so many servers."""
    size = len(next(iter(values.values())))
    dtype = next(iter(values.values())).dtype
    parts = []
    for server in range(min(servers, len(slices))):
        mine = slices[server::servers]
        parts.append(SlicedVectors(size, mine, dtype))
        for (name, value), (first, end) in itertools.product(values.items(), mine):
            parts[-1].tensor(name, (first, end)).copy_(value[first:end])
    return JoinedVectors(size, parts)


def whole(joined: JoinedVectors, name: str) -> torch.Tensor:
    out = None
    for part in joined._parts:
        assert isinstance(part, SlicedVectors)
        for first, end in part._slices:
            piece = part.tensor(name, (first, end))
            out = torch.full((joined.size,), math.nan, dtype=piece.dtype) if out is None else out
            out[first:end] = piece
    assert out is not None
    return out


def example(size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Values of very different sizes: every other order of addition gives other bits."""
    generator = torch.Generator().manual_seed(size)
    scale = torch.exp(6 * torch.randn(size, generator=generator, dtype=torch.float64))
    return {n: (torch.randn(size, generator=generator, dtype=torch.float64) * scale).to(dtype) for n in "abc"}


@st.composite
def divisions(draw: st.DrawFn) -> tuple[int, list[Range], int]:
    size = draw(st.integers(1, 3000))
    cuts = draw(st.lists(st.integers(1, 46), max_size=8))
    return size, ranges(size, cuts), draw(st.integers(1, 5))


@patient
@given(divisions(), st.sampled_from([torch.float32, torch.float64]))
def test_no_bit_depends_on_the_cuts(division: tuple[int, list[Range], int], dtype: torch.dtype) -> None:
    size, slices, servers = division
    values = example(size, dtype)
    one, many = spread(values, [(0, size)], 1), spread(values, slices, servers)
    pairs = [("a", "b"), ("a", "a"), ("c", "b")]
    for each in (one, many):
        each.combine("d", [(0.1, "a"), (-1.7, "b"), (3e-5, "c")])
        each.combine("a", [(1.0, "a"), (0.3, "d")])  # a target that is a term
        each.copy("e", "d")
    assert many.dot([*pairs, ("d", "a")]) == one.dot([*pairs, ("d", "a")])
    assert many.sum_abs(["a", "d"]) == one.sum_abs(["a", "d"])
    assert many.max_abs(["a", "d"]) == one.max_abs(["a", "d"])
    for name in "ade":
        assert torch.equal(whole(many, name), whole(one, name))


def test_scratch_space_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    values = example(5000, torch.float32)
    joined = spread(values, ranges(5000, [3, 40]), 2)
    roomy = joined.dot([("a", "b"), ("b", "c")])
    joined.combine("d", [(0.1, "a"), (-1.7, "b")])
    before = whole(joined, "d")
    monkeypatch.setattr(module, "_SCRATCH", 256)
    joined.combine("d", [(0.1, "a"), (-1.7, "b")])
    assert joined.dot([("a", "b"), ("b", "c")]) == roomy
    assert torch.equal(whole(joined, "d"), before)


def test_the_number_of_threads_does_not_show() -> None:
    values = example(200_000, torch.float32)
    joined = spread(values, ranges(200_000, [7, 1000]), 2)
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            joined.combine("d", [(0.1, "a"), (-1.7, "b")])
            found.append((joined.dot([("d", "b")]), whole(joined, "d")))
    finally:
        torch.set_num_threads(threads)
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_a_sum_is_the_tree_over_blocks_written_out() -> None:
    size = 64 * 5 + 7
    values = example(size, torch.float64)

    def fold(numbers: list[float]) -> float:
        while len(numbers) > 1:
            half = len(numbers) // 2
            numbers = [a + b for a, b in zip(numbers[:half], numbers[half:], strict=True)]
        return numbers[0]

    products = [a * b for a, b in zip(values["a"].tolist(), values["b"].tolist(), strict=True)] + [0.0] * 57

    def tree(node: Range) -> float:
        if node[1] - node[0] == 1:
            return fold(products[node[0] * 64 : node[1] * 64])
        left, right = split(node)
        return tree(left) + tree(right)

    assert spread(values, ranges(size, [2, 3]), 2).dot([("a", "b")]) == [tree((0, 6))]


def test_sums_are_right() -> None:
    values = example(10_000, torch.float32)
    a, b = values["a"].tolist(), values["b"].tolist()
    joined = spread(values, ranges(10_000, [9, 77]), 3)
    exact = math.fsum(x * y for x, y in zip(a, b, strict=True))
    size = math.fsum(abs(x * y) for x, y in zip(a, b, strict=True))
    assert abs(joined.dot([("a", "b")])[0] - exact) <= 1e-15 * size
    assert joined.sum_abs(["a"])[0] == pytest.approx(math.fsum(map(abs, a)), rel=1e-14)
    assert joined.max_abs(["b"]) == [max(map(abs, b))]


def test_a_combination_is_rounded_once() -> None:
    joined = spread({"big": torch.tensor([1e8]), "small": torch.tensor([1.0])}, [(0, 1)], 1)
    joined.combine("sum", [(1.0, "big"), (1.0, "small"), (-1.0, "big")])
    assert whole(joined, "sum").item() == 1.0  # float32 sums would have lost it


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_every_answer(bad: float) -> None:
    value = torch.zeros(200)
    value[150] = bad
    joined = spread({"v": value}, ranges(200, [1, 2]), 3)
    answers = [*joined.dot([("v", "v")]), *joined.max_abs(["v"]), *joined.sum_abs(["v"])]
    assert not any(math.isfinite(answer) for answer in answers)
    assert math.isnan(answers[1]) == math.isnan(bad)


def test_dropped_vectors_are_gone_and_may_be_dropped_again() -> None:
    joined = spread({"a": torch.ones(100), "b": torch.ones(100)}, ranges(100, [1]), 2)
    joined.drop(["a", "never"])
    joined.drop(["a"])
    assert joined.dot([("b", "b")]) == [100.0]
    for use in (lambda: joined.dot([("a", "b")]), lambda: joined.combine("b", [(1.0, "b"), (1.0, "a")])):
        with pytest.raises(DistBeliefError, match="no vector called 'a'"):
            use()
    assert joined.dot([("b", "b")]) == [100.0]  # a refused command changes nothing


@pytest.mark.parametrize("bad", [(0, 50), (10, 100), (64, 64), (64, 164), (-64, 64)])
def test_slices_that_would_change_sums_are_refused(bad: Range) -> None:
    with pytest.raises(DistBeliefError, match="cannot be a slice"):
        SlicedVectors(100, [bad])


def test_a_slice_without_a_server_is_no_zero() -> None:
    part = SlicedVectors(300, [(0, 64), (128, 300)])
    for where in ((0, 64), (128, 300)):
        part.tensor("v", where).fill_(1.0)
    partials = part.partial_dot([("v", "v")])
    with pytest.raises(DistBeliefError, match="elements 64 to 128"):
        add_partials(300, partials)
    assert add_partials(300, [*partials[::-1], ((1, 2), [64.0]), partials[0]]) == [300.0]  # any order, repeated or not


def test_examples_run() -> None:
    assert doctest.testmod(module).failed == 0
