"""What counts as identical, equal and different."""

from __future__ import annotations

import math

import pytest
import torch

from distbelief.errors import DistBeliefError
from distbelief.verification.compare import (
    TOLERANCE_BF16,
    TOLERANCE_FP32,
    Comparison,
    Trained,
    allow_for_noise,
    compare,
    default_tolerance,
)

LOSSES = {0: 0.5, 1: 0.4, 2: 0.3}


def compared(one: torch.Tensor, other: torch.Tensor, tolerance: float = 1e-4) -> Comparison:
    return compare(Trained({"w": one}, LOSSES), Trained({"w": other}, LOSSES), tolerance)


def test_the_same_bits() -> None:
    tensor = torch.tensor([1.0, math.nan, -0.0, math.inf])
    found = compared(tensor, tensor.clone())
    assert (found.verdict, found.max_difference, found.first_step) == ("identical", 0.0, None)
    assert (found.steps, found.tensors, found.differences) == (3, 1, ())


def test_the_same_numbers_in_other_bits_are_equal_only() -> None:
    found = compared(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), tolerance=0.0)
    assert (found.verdict, found.max_difference) == ("equal", 0.0)


def test_the_tolerance_is_relative_to_the_tensors_largest_number() -> None:
    large, moved = torch.tensor([1000.0, 1e-3]), torch.tensor([1000.0, 2e-3])
    assert compared(large, moved).verdict == "equal"
    assert compared(large[1:], moved[1:]).verdict == "different"
    assert compared(large, moved, tolerance=9e-7).verdict == "different"
    assert compared(large, moved).max_difference == pytest.approx(1e-3)


def test_a_number_against_none() -> None:
    for odd in (math.nan, math.inf):
        found = compared(torch.tensor([1.0, odd]), torch.tensor([1.0, 2.0]), tolerance=1e9)
        assert (found.verdict, found.max_difference) == ("different", math.inf)
    both = compared(torch.tensor([1.0, math.inf]), torch.tensor([1.00001, math.inf]))
    assert both.verdict == "equal"


def test_whole_numbers_are_the_same_or_wrong() -> None:
    found = compared(torch.tensor(1_000_000), torch.tensor(1_000_001), tolerance=0.1)
    assert (found.verdict, found.max_difference) == ("different", 1.0)


def test_the_worst_tensor_comes_first_and_decides() -> None:
    one = {name: torch.tensor([size]) for name, size in (("a", 100.0), ("b", 1.0), ("c", 1.0))}
    other = {"a": torch.tensor([100.01]), "b": torch.tensor([1.001]), "c": torch.tensor([1.0])}
    found = compare(Trained(one, LOSSES), Trained(other, LOSSES), 5e-4)
    assert [difference.name for difference in found.differences] == ["b", "a"]
    assert found.verdict == "different"
    assert found.max_difference == pytest.approx(0.01, rel=1e-3)


def test_the_first_step() -> None:
    one, other = {"w": torch.tensor([1.0])}, {"w": torch.tensor([1.00001])}
    assert compare(Trained(one, LOSSES), Trained(other, {**LOSSES, 1: 0.41}), 1e-4).first_step == 1
    assert compare(Trained(one, LOSSES), Trained(other, LOSSES), 1e-4).first_step == 2
    assert compare(Trained(one, LOSSES), Trained(other, {0: 0.5}), 1e-4).first_step == 1


def test_other_models_are_not_compared() -> None:
    one, other = {"a": torch.zeros(2), "b": torch.zeros(2)}, {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(DistBeliefError, match="different models: b: float32"):
        compare(Trained(one, LOSSES), Trained(other, LOSSES), 1.0)


def test_16_bits_have_a_larger_tolerance() -> None:
    weights = {"w": torch.zeros(2)}
    assert default_tolerance(weights, "fp32") == TOLERANCE_FP32
    assert default_tolerance(weights, "bf16") == TOLERANCE_BF16
    assert default_tolerance({"w": torch.zeros(2, dtype=torch.float16)}, "fp32") == TOLERANCE_BF16


def trained(**weights: list[float]) -> Trained:
    return Trained({name: torch.tensor(values) for name, values in weights.items()}, {0: 1.0})


PLAIN = trained(weight=[1.0] * 50, bias=[0.5])


def test_a_difference_of_the_size_of_rounding_is_none() -> None:
    other, nudged = trained(weight=[1.003] * 50, bias=[0.5]), trained(weight=[1.001] * 50, bias=[0.5])
    found = compare(other, PLAIN, 1e-4)
    assert found.verdict == "different"
    assert allow_for_noise(found, PLAIN, nudged).verdict == "equal"


def test_a_difference_that_rounding_does_not_explain_stays_one() -> None:
    other, nudged = trained(weight=[1.1] * 50, bias=[0.5]), trained(weight=[1.001] * 50, bias=[0.5])
    judged = allow_for_noise(compare(other, PLAIN, 1e-4), PLAIN, nudged)
    assert judged.verdict == "different"
    assert not judged.noisy


def test_a_tensor_that_rounding_moves_about_says_nothing() -> None:
    other, nudged = trained(weight=[1.0] * 50, bias=[-0.5]), trained(weight=[1.0] * 50, bias=[0.4])
    assert allow_for_noise(compare(other, PLAIN, 1e-4), PLAIN, nudged).verdict == "equal"


def test_where_rounding_moves_much_nothing_can_be_said() -> None:
    other, nudged = trained(weight=[1.5] * 50, bias=[0.5]), trained(weight=[0.8] * 50, bias=[0.5])
    judged = allow_for_noise(compare(other, PLAIN, 1e-4), PLAIN, nudged)
    assert judged.verdict == "different"
    assert judged.noisy
