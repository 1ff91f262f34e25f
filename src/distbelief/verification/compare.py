"""Compares two runs of one job: are the weights bit-identical, or how far apart, and from which step on?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from distbelief.checkpoint.tensorforms import differences, forms, misfit

TOLERANCE_FP32 = 1e-4
"""Rounding is 6e-8 per operation. Measured after 50 steps: runs that add in another order differ by 1e-7 to 1e-5, and
by 7e-5 where Adam moves a bias whose true gradient is zero; runs with other dropout masks differ by 1e-1.
"""
TOLERANCE_BF16 = 2e-2
"""A number of bf16 has 8 bits: neighbouring numbers differ by up to 8e-3. Measured after 50 steps: 6e-3."""

ABOVE_NOISE = 10
"""A difference up to this multiple of the effect of rounding alone still counts as rounding. Measured on gpt.py after
50 steps: two strategies differ from the plain loop by 0.3 to 3 times the difference of the nudged loop.
"""
LOST_IN_NOISE = 0.05
"""A tensor that rounding alone moves by this much says nothing (a bias whose true gradient is zero, under Adam)."""
MOST_LOST = 0.05
"""Largest share of numbers in such tensors; above it, two runs cannot be compared after this number of steps."""

Verdict = Literal["identical", "equal", "different"]


@dataclass(frozen=True)
class Trained:
    """The results of a run."""

    weights: Mapping[str, torch.Tensor]
    losses: Mapping[int, float | None]
    """Loss by step."""


@dataclass(frozen=True)
class Difference:
    """The distance between two tensors with different bits."""

    name: str
    largest: float
    """Largest absolute difference. Infinite where only one of the two numbers is finite."""
    relative: float
    """Relative to the largest magnitude in either tensor. Infinite for integers, which must be equal."""
    noise: float | None = None
    """The effect of rounding alone on this tensor, as a relative difference; None: not measured."""

    def explained(self, tolerance: float) -> bool:
        """Whether rounding can explain the difference."""
        noise = self.noise or 0.0
        return self.relative <= max(tolerance, ABOVE_NOISE * noise) or LOST_IN_NOISE <= noise < math.inf


@dataclass(frozen=True)
class Comparison:
    verdict: Verdict
    steps: int
    tensors: int
    tolerance: float
    first_step: int | None
    """The first step whose loss differs, or the last step if no loss differs: no later loss shows the last update. None
    if the weights are identical."""
    differences: tuple[Difference, ...]
    """The differing tensors, by relative difference, largest first."""
    noisy: bool = False
    """Rounding alone makes such a difference after this number of steps: the comparison says nothing."""

    @property
    def max_difference(self) -> float:
        return max((one.largest for one in self.differences), default=0.0)


def compare(one: Trained, other: Trained, tolerance: float) -> Comparison:
    """Judge two runs. `tolerance`: the largest relative difference of each tensor.

    >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0001])
    >>> found = compare(Trained({"w": a}, {0: 0.5, 1: 0.4}), Trained({"w": b}, {0: 0.5, 1: 0.4001}), 1e-4)
    >>> found.verdict, found.first_step
    ('equal', 1)
    """
    _require_one_model(one.weights, other.weights)
    found = [_difference(name, tensor, other.weights[name]) for name, tensor in one.weights.items()]
    differences = sorted((d for d in found if d), key=lambda d: (-d.relative, -d.largest, d.name))
    verdict: Verdict = "identical"
    if differences:
        verdict = "equal" if differences[0].relative <= tolerance else "different"
    return Comparison(
        verdict=verdict,
        steps=len(one.losses),
        tensors=len(found),
        tolerance=tolerance,
        first_step=_first_step(one.losses, other.losses) if differences else None,
        differences=tuple(differences),
    )


def with_tables_alike(one: Trained, other: Trained) -> tuple[Trained, Trained]:
    """Reduce a table that was on servers in one run and a parameter in the other to the rows that the first run has.
    (No step has looked up the other rows, so they have their initial values.)

    >>> served = Trained({"users.rows": torch.tensor([1]), "users.values": torch.tensor([[5.0]])}, {})
    >>> whole = Trained({"users.weight": torch.tensor([[3.0], [5.0]])}, {})
    >>> with_tables_alike(whole, served)[0].weights["users.values"]
    tensor([[5.]])
    """
    return _alike(one, other.weights), _alike(other, one.weights)


def _alike(one: Trained, other: Mapping[str, torch.Tensor]) -> Trained:
    weights = dict(one.weights)
    for rows in [name for name in other if name.endswith(".rows") and name not in weights]:
        table = rows.removesuffix(".rows")
        if (whole := weights.pop(f"{table}.weight", None)) is not None:
            weights[rows], weights[f"{table}.values"] = other[rows], whole[other[rows]]
    return replace(one, weights=weights)


def allow_for_noise(found: Comparison, one: Trained, nudged: Trained) -> Comparison:
    """Judge again with the measured effect of rounding.

    `one` and `nudged` are two runs of the plain loop; the second started from weights changed by one rounding.
    """
    noise = {d.name: d.relative for n, t in one.weights.items() if (d := _difference(n, t, nudged.weights[n]))}
    differences = tuple(replace(d, noise=noise.get(d.name, 0.0)) for d in found.differences)
    sizes = {name: tensor.numel() for name, tensor in one.weights.items()}
    lost = sum(sizes[name] for name, relative in noise.items() if relative >= LOST_IN_NOISE)
    fair = lost <= MOST_LOST * sum(sizes.values())
    verdict: Verdict = "equal" if fair and all(d.explained(found.tolerance) for d in differences) else "different"
    ordered = sorted(differences, key=lambda d: (d.explained(found.tolerance), -d.relative, -d.largest, d.name))
    return replace(found, verdict=verdict, differences=tuple(ordered), noisy=not fair)


def default_tolerance(weights: Mapping[str, torch.Tensor], precision: str) -> float:
    """The difference that rounding alone can explain; larger if 16-bit numbers are used."""
    short = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in weights.values())
    return TOLERANCE_BF16 if short or precision != "fp32" else TOLERANCE_FP32


def _require_one_model(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    if lines := differences(forms(one), "one run", forms(other), "the other"):
        hint = "the job must make the same model each time it is loaded"
        raise misfit("the two runs trained different models", lines, hint=hint)


def _difference(name: str, one: torch.Tensor, other: torch.Tensor) -> Difference | None:
    one, other = one.contiguous().reshape(-1), other.contiguous().reshape(-1)
    if torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
        return None
    if not one.is_floating_point():
        return Difference(name, float((one.double() - other.double()).abs().max()), math.inf)
    a, b = one.double(), other.double()
    same = (a == b) | (a.isnan() & b.isnan())  # two infinities count as equal, too; their difference would be NaN
    largest = float(torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf).max())
    magnitude = float(torch.maximum(a.abs(), b.abs()).nan_to_num(nan=0.0, posinf=0.0).max())
    return Difference(name, largest, largest / magnitude if largest and magnitude else largest)


def _first_step(one: Mapping[int, float | None], other: Mapping[int, float | None]) -> int:
    steps = sorted(one.keys() | other.keys())
    return next((step for step in steps if one.get(step) != other.get(step)), steps[-1])
