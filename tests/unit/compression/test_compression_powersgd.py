"""PowerSGD: exact where the gradient has few directions, near elsewhere, never stuck, and the same for all members."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from distbelief.compression.powersgd import LowRank, PowerSGD, orthonormal
from distbelief.errors import DistBeliefError

SHAPES = [(40, 60), (60,), (8, 3, 5, 5), (2, 3), (), (0, 7), (64, 16)]


def alone(vector: Tensor) -> Tensor:
    return vector


def matrix(rows: int, columns: int, rank: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, rank, generator=random) @ torch.randn(rank, columns, generator=random)


def gradients(seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random) for shape in SHAPES]


def state_of(method: PowerSGD, shapes: list[tuple[int, ...]]) -> tuple[list[Tensor], list[Tensor]]:
    """Residuals and queries in memory of the test's, before the first step."""
    residuals = [torch.zeros(shapes[at]) for at in method.compressed]
    queries = [start.clone() for start in method.starts]
    method.keep_in(residuals, queries)
    return residuals, queries


def together(members: list[Callable[[Callable[[Tensor], Tensor]], list[Tensor]]]) -> list[list[Tensor]]:
    """Run members in threads that meet at every sum, added in the order of the members."""
    size = len(members)
    given: list[Tensor] = [torch.empty(0)] * size
    results: list[list[Tensor]] = [[]] * size
    meet = threading.Barrier(size, timeout=30)

    def run(rank: int) -> None:
        def all_sum(vector: Tensor) -> Tensor:
            given[rank] = vector.clone()
            meet.wait()
            total = given[0].clone()
            for other in given[1:]:
                total += other
            meet.wait()
            return total

        results[rank] = members[rank](all_sum)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e12])
def test_a_matrix_of_so_few_directions_is_recovered_at_once(rank: int, scale: float) -> None:
    gradient = matrix(50, 70, rank) * scale
    (got,) = PowerSGD([(50, 70)], 4, seed=1).reduce([gradient], alone)
    torch.testing.assert_close(got / scale, gradient / scale, rtol=1e-4, atol=1e-4)


def test_what_is_small_or_flat_is_summed_as_it_is() -> None:
    given = gradients(0)
    method = PowerSGD(SHAPES, 2, seed=0)
    got = method.reduce(given, alone)
    assert [g.shape for g in got] == [torch.Size(s) for s in SHAPES]
    for at in (1, 3, 4, 5):
        assert torch.equal(got[at], given[at])
    for at in (0, 2, 6):
        assert not torch.equal(got[at], given[at])


def test_bytes_are_those_of_the_factors() -> None:
    sent: list[int] = []

    def counting(vector: Tensor) -> Tensor:
        sent.append(vector.numel() * 4)
        return vector

    method = PowerSGD([(512, 1024), (100,)], 4, seed=0)
    method.reduce([torch.ones(512, 1024), torch.ones(100)], counting)
    assert sent == [4 * (4 * 512 + 100), 4 * 4 * 1024]
    assert method.size_bytes == sum(sent)
    assert method.ratio == pytest.approx((512 * 1024 + 100) * 4 / sum(sent))


def test_nothing_at_all_can_be_summed() -> None:
    assert PowerSGD([], 4, 0).reduce([], alone) == []
    assert PowerSGD([], 4, 0).ratio == 1.0


def test_a_warm_start_finds_the_strongest_directions() -> None:
    gradient = matrix(60, 80, 2) + 0.01 * matrix(60, 80, 60, seed=3)
    method = PowerSGD([(60, 80)], 2, seed=0)
    (residual,), _ = state_of(method, [(60, 80)])
    best = torch.linalg.svdvals(gradient)[2:].norm()
    errors = []
    for _ in range(6):
        residual.zero_()
        (got,) = method.reduce([gradient], alone)
        errors.append(float((gradient - got).norm()))
    assert errors[-1] <= errors[0]
    assert errors[-1] == pytest.approx(float(best), rel=1e-3)


def test_over_many_steps_all_of_it_is_sent() -> None:
    gradient = matrix(30, 40, 30)
    method = PowerSGD([(30, 40)], 2, seed=0)
    (residual,), _ = state_of(method, [(30, 40)])
    total, steps = torch.zeros(30, 40), 300
    for _ in range(steps):
        total += method.reduce([gradient], alone)[0]
    assert float((total / steps - gradient).norm() / gradient.norm()) < 0.1
    torch.testing.assert_close(total + residual, gradient * steps, rtol=1e-3, atol=0.05)


@pytest.mark.parametrize("size", [2, 3])
def test_members_get_the_same_bits_and_the_sum_of_all(size: int) -> None:
    def member(rank: int) -> Callable[[Callable[[Tensor], Tensor]], list[Tensor]]:
        def steps(all_sum: Callable[[Tensor], Tensor]) -> list[Tensor]:
            method = PowerSGD(SHAPES, 2, seed=7)
            residuals, _ = state_of(method, SHAPES)
            got: list[Tensor] = []
            for step in range(5):
                got += [g.clone() for g in method.reduce(gradients(100 * step + rank), all_sum)]
            left = dict(zip(method.compressed, residuals, strict=True))
            return got + [left.get(at, torch.zeros(shape)) for at, shape in enumerate(SHAPES)]

        return steps

    results = together([member(rank) for rank in range(size)])
    sums = 5 * len(SHAPES)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0][:sums], other[:sums], strict=True))
    for at in range(len(SHAPES)):
        sent = sum(results[0][step * len(SHAPES) + at] for step in range(5))
        left = sum(result[sums + at] for result in results)
        wanted = sum(gradients(100 * step + rank)[at] for step in range(5) for rank in range(size))
        torch.testing.assert_close(sent + left, wanted, rtol=1e-4, atol=1e-4)


def test_two_members_with_few_directions_together_are_summed_exactly() -> None:
    parts = [matrix(50, 70, 2, seed=1), matrix(50, 70, 2, seed=2)]
    results = together([lambda s, p=p: PowerSGD([(50, 70)], 4, 3).reduce([p], s) for p in parts])
    torch.testing.assert_close(results[0][0], parts[0] + parts[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(results[0][0], results[1][0])


def test_a_gradient_that_was_zero_once_is_found_again() -> None:
    """Its first rows are zero, so directions that are only made up there would never see it."""
    gradient = matrix(50, 70, 2)
    gradient[:10] = 0
    method = PowerSGD([(50, 70)], 4, seed=0)
    for _ in range(2):
        assert not method.reduce([torch.zeros(50, 70)], alone)[0].any()
    (got,) = method.reduce([gradient], alone)
    torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-4)


def test_directions_that_come_later_are_found() -> None:
    method = PowerSGD([(50, 70)], 2, seed=0)
    for _ in range(3):
        method.reduce([matrix(50, 70, 1, seed=1)], alone)
    later = matrix(50, 70, 2, seed=9)
    total = torch.zeros(50, 70)
    for _ in range(20):
        total += method.reduce([later], alone)[0]
    assert float((total / 20 - later).norm() / later.norm()) < 0.05


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_broken_step_is_seen_by_all_and_does_not_break_the_next(odd: float) -> None:
    broken = matrix(50, 70, 2)
    broken[3, 4] = odd

    def member(first: Tensor) -> Callable[[Callable[[Tensor], Tensor]], list[Tensor]]:
        def steps(all_sum: Callable[[Tensor], Tensor]) -> list[Tensor]:
            method = PowerSGD([(50, 70)], 4, seed=0)
            one = method.reduce([first], all_sum)[0].clone()
            return [one, method.reduce([matrix(50, 70, 2)], all_sum)[0]]

        return steps

    for one, two in together([member(broken), member(matrix(50, 70, 2))]):
        assert not one.isfinite().all()
        torch.testing.assert_close(two, 2 * matrix(50, 70, 2), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(3, 20), torch.ones(3, 20), matrix(4, 20, 2), matrix(4, 20, 4) * 1e-30, torch.eye(3, 20) * 1e30],
)
def test_rows_become_orthonormal_whatever_they_were(rows: Tensor) -> None:
    got = orthonormal(rows)
    torch.testing.assert_close(got @ got.T, torch.eye(len(rows)), rtol=1e-5, atol=1e-5)
    scaled = rows / rows.abs().max() if rows.any() else rows
    torch.testing.assert_close(scaled @ got.T @ got, scaled, rtol=1e-4, atol=1e-5)


def test_a_run_goes_on_from_saved_state_with_the_same_bits() -> None:
    one, before, after = (PowerSGD(SHAPES, 2, seed=5) for _ in range(3))
    wanted_state, kept = state_of(one, SHAPES), state_of(before, SHAPES)
    for step in range(3):
        one.reduce(gradients(step), alone)
        before.reduce(gradients(step), alone)
    saved = [[value.clone() for value in values] for values in kept]
    before.reduce(gradients(9), alone)
    after.reduce(gradients(8), alone)
    after.keep_in(*saved)
    for step in range(3, 6):
        wanted, got = one.reduce(gradients(step), alone), after.reduce(gradients(step), alone)
        assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    for values, others in zip(wanted_state, saved, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(values, others, strict=True))


@pytest.mark.parametrize("wrong", [torch.zeros(50, 71), torch.zeros(50, 70).double()])
def test_other_shapes_and_types_are_refused(wrong: Tensor) -> None:
    with pytest.raises(DistBeliefError, match="PowerSGD"):
        LowRank(4).over([(50, 70)], seed=0).reduce([wrong], alone)


def test_training_gets_there() -> None:
    """Linear regression of matrices by two members, each with half of the data."""
    random = torch.Generator().manual_seed(0)
    truth = torch.randn(24, 20, generator=random)
    halves = [torch.randn(100, 20, generator=random) for _ in range(2)]

    def member(inputs: Tensor) -> Callable[[Callable[[Tensor], Tensor]], list[Tensor]]:
        def train(all_sum: Callable[[Tensor], Tensor]) -> list[Tensor]:
            method, weights = PowerSGD([(24, 20)], 1, seed=0), torch.zeros(24, 20)
            for _ in range(1500):
                gradient = (inputs @ weights.T - inputs @ truth.T).T @ inputs / 200
                weights -= 0.05 * method.reduce([gradient], all_sum)[0]
            return [weights]

        return train

    one, two = together([member(half) for half in halves])
    assert torch.equal(one[0], two[0])
    assert float((one[0] - truth).norm() / truth.norm()) < 1e-3


def test_gradients_on_a_device_have_the_sums_of_those_on_the_host() -> None:
    """The host's memory stands in for a device's: the factors still travel in memory of their own."""
    host, device = (LowRank(2).over(SHAPES, seed=3, device=one) for one in (None, torch.device("cpu")))
    states = [state_of(power, SHAPES) for power in (host, device)]
    for step in range(4):
        given = gradients(step)
        if step == 2:
            given[0][0, 0] = math.nan
        sums = [power.reduce(given, lambda vector: vector * 2) for power in (host, device)]
        for one, two in zip(*sums, strict=True):
            assert torch.equal(one.nan_to_num(7.0), two.nan_to_num(7.0))
    for values, others in zip(*states, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(values, others, strict=True))
