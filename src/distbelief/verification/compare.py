"""Two runs of one job side by side: are the weights the same bits, or how far apart, and from which step on?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from distbelief.checkpoint.fit import differences, forms, misfit

TOLERANCE_FP32 = 1e-4
"""Rounding is 6e-8 per operation. Runs that add in another order were 1e-7 to 1e-5 apart after 50 steps (measured), and
7e-5 where Adam moves a bias whose true gradient is zero; runs with other dropout masks 1e-1."""
TOLERANCE_BF16 = 2e-2
"""A number of bf16 has 8 bits: two that are neighbours are up to 8e-3 apart. Measured after 50 steps: 6e-3."""

ABOVE_NOISE = 10
"""So many times what rounding alone does to a tensor may be a difference that still counts as rounding. Measured on
gpt.py after 50 steps: two strategies are 0.3 to 3 times as far from the plain loop as the nudged one is."""
LOST_IN_NOISE = 0.05
"""A tensor that rounding alone moves by that much says nothing (a bias whose true gradient is zero, under Adam)."""
MOST_LOST = 0.05
"""Of all numbers. Where more are lost, two runs cannot be compared after so many steps."""

Verdict = Literal["identical", "equal", "different"]


@dataclass(frozen=True)
class Trained:
    """What a run leaves."""

    weights: Mapping[str, torch.Tensor]
    losses: Mapping[int, float | None]
    """By step."""


@dataclass(frozen=True)
class Difference:
    """How far apart two tensors are whose bits are not the same."""

    name: str
    largest: float
    """Absolute. Infinite where only one of the two numbers is finite."""
    relative: float
    """To the largest magnitude in either tensor. Infinite between whole numbers, which are the same or wrong."""
    noise: float | None = None
    """What rounding alone does to this tensor, in the same measure; None: that was not looked into."""

    def explained(self, tolerance: float) -> bool:
        """Whether rounding may be all there is to it."""
        noise = self.noise or 0.0
        return self.relative <= max(tolerance, ABOVE_NOISE * noise) or LOST_IN_NOISE <= noise < math.inf


@dataclass(frozen=True)
class Comparison:
    verdict: Verdict
    steps: int
    tensors: int
    tolerance: float
    first_step: int | None
    """The first step whose loss differs, or the last step if none does: its own update shows in no loss. None if the
    weights are identical."""
    differences: tuple[Difference, ...]
    """The worst first, by the relative difference."""
    noisy: bool = False
    """Rounding alone leads elsewhere after so many steps: nothing can be said."""

    @property
    def max_difference(self) -> float:
        return max((one.largest for one in self.differences), default=0.0)


def compare(one: Trained, other: Trained, tolerance: float) -> Comparison:
    """Judge two runs. `tolerance` is for the relative difference of each tensor.

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
    """A table that lay on servers in one run and was a parameter in the other: of that, the rows that the first has.
    (All others have never been looked up, and are as they were at first.)

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
    """Judge again, knowing how far two runs come apart of which one began a rounding away from the other.

    `one` and `nudged` are those two, of the plain loop.
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
    """What rounding alone may explain: more where numbers of 16 bits are at work."""
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
    same = (a == b) | (a.isnan() & b.isnan())  # also two infinities, whose difference would be NaN
    largest = float(torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf).max())
    magnitude = float(torch.maximum(a.abs(), b.abs()).nan_to_num(nan=0.0, posinf=0.0).max())
    return Difference(name, largest, largest / magnitude if largest and magnitude else largest)


def _first_step(one: Mapping[int, float | None], other: Mapping[int, float | None]) -> int:
    steps = sorted(one.keys() | other.keys())
    return next((step for step in steps if one.get(step) != other.get(step)), steps[-1])
