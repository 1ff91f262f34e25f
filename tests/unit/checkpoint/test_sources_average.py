"""The mean of several models: exact sums, one rounding, and nothing averaged that does not belong together."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from distbelief.checkpoint.sources import Source, average, round_once
from distbelief.checkpoint.weights import save_tensors
from distbelief.errors import DistBeliefError

Tensors = dict[str, torch.Tensor]

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a noisy machine is no failure


def sources(*contents: Tensors) -> list[Source]:
    return [Source(Path(f"run{i}"), content, None) for i, content in enumerate(contents)]


def test_the_mean_of_every_number() -> None:
    a, b, c = ({"w": torch.tensor([[1.0, x], [0.5, -x]]), "n": torch.tensor(3)} for x in (1.0, 2.0, 6.0))
    mean = average(sources(a, b, c))
    assert torch.equal(mean["w"], torch.tensor([[1.0, 3.0], [0.5, -3.0]]))
    assert torch.equal(mean["n"], torch.tensor(3))
    assert list(mean) == ["w", "n"]


def test_weights_are_normalised() -> None:
    a, b = {"w": torch.tensor([0.0, 8.0])}, {"w": torch.tensor([4.0, 0.0])}
    for weights in ([0.75, 0.25], [3.0, 1.0]):
        assert torch.equal(average(sources(a, b), weights)["w"], torch.tensor([1.0, 6.0]))


@patient
@given(some.lists(some.integers(-(2**20), 2**20), min_size=2, max_size=7))
def test_a_float32_mean_is_the_true_mean_rounded_once(values: list[int]) -> None:
    found = average(sources(*({"w": torch.tensor([float(v)])} for v in values)))["w"].item()
    assert found == float(np.float32(float(Fraction(sum(values), len(values)))))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64])
def test_the_mean_of_equal_models_is_the_model(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    one = {"w": torch.randn(1000, dtype=torch.complex64 if dtype.is_complex else torch.float64).to(dtype)}
    for weights in ([1.0, 1.0], [0.7, 0.3]):
        mean = average(sources(one, one), weights)["w"]
        assert mean.dtype == dtype
        if dtype != torch.float64 or weights == [1.0, 1.0]:
            assert torch.equal(mean, one["w"])


@patient
@given(some.floats(width=64, allow_nan=False, min_value=-70000, max_value=70000))
def test_one_rounding_to_float16_is_numpys(value: float) -> None:
    with np.errstate(over="ignore"):
        expected = np.float64(value).astype(np.float16)
    found = round_once(torch.tensor([value], dtype=torch.float64), torch.float16)
    assert found.numpy()[0].tobytes() == expected.tobytes()


@patient
@given(some.floats(width=64, min_value=1e-30, max_value=1e30))
def test_no_bfloat16_is_nearer_than_the_one_rounded_to(value: float) -> None:
    found = round_once(torch.tensor([value], dtype=torch.float64), torch.bfloat16)
    off = abs(Fraction(found.item()) - Fraction(value))
    for step in (-1, 1):
        neighbour = (found.view(torch.int16) + step).view(torch.bfloat16).item()
        assert off <= abs(Fraction(neighbour) - Fraction(value))


def test_torch_alone_would_round_twice() -> None:
    value = torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64)
    assert value.to(torch.bfloat16).item() == 1.0
    assert round_once(value, torch.bfloat16).item() == 1 + 2**-7


def test_infinities_survive() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        mask = {"mask": torch.tensor([float("-inf"), 0.0], dtype=dtype)}
        assert torch.equal(average(sources(mask, mask))["mask"], mask["mask"])


def test_the_same_bytes_every_time(tmp_path: Path) -> None:
    torch.manual_seed(0)
    models = [{f"layer{i}": torch.randn(50, 7) for i in range(20)} for _ in range(3)]
    for file in ("one", "two"):
        save_tensors(average(sources(*models), [0.2, 0.3, 0.5]), tmp_path / file)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def refusal(*contents: Tensors) -> str:
    with pytest.raises(DistBeliefError) as caught:
        average(sources(*contents))
    return f"{caught.value.message}\n{caught.value.details}\n{caught.value.hint}"


def test_names_shapes_and_types_must_agree() -> None:
    one = {"a": torch.zeros(2, 3), "b": torch.zeros(2), "c": torch.zeros(1)}
    said = refusal(one, one, {"a": torch.zeros(3, 2), "b": torch.zeros(2).double(), "d": torch.zeros(1)})
    assert "a: float32 [2, 3] in run0, float32 [3, 2] in run2 (and 3 more)" in said
    assert "b: float32 [2] in run0, float64 [2] in run2" in said
    assert "c: float32 [1] in run0, missing in run2" in said
    assert "d: missing in run0, float32 [1] in run2" in said
    assert "run1" not in said


@pytest.mark.parametrize("values", [(3, 4), (True, False)])
def test_whole_numbers_and_booleans_must_agree(values: tuple[int, int]) -> None:
    first, second = ({"steps": torch.tensor(v), "w": torch.zeros(1)} for v in values)
    assert "steps: run0 and run2 hold other values" in refusal(first, first, second)


def test_a_model_that_is_not_a_number_is_named() -> None:
    said = refusal({"w": torch.zeros(2)}, {"w": torch.tensor([0.0, float("nan")])})
    assert "w: the average is not a number" in said
    assert "leave out run1" in said
