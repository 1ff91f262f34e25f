"""The element-wise mean of several models: summed in float64 in the given order, then rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distbelief.checkpoint.fit import differences, forms, misfit
from distbelief.checkpoint.sources import Source
from distbelief.errors import DistBeliefError

_ONE_ROUNDING_AWAY = {torch.float64, torch.float32, torch.complex128, torch.complex64}


def average(sources: Sequence[Source], weights: Sequence[float] | None = None) -> dict[str, torch.Tensor]:
    """Σ wᵢ·xᵢ / Σ wᵢ of each floating tensor. Integer and boolean tensors have no mean: they must be equal in all
    sources."""
    shares = [1.0] * len(sources) if weights is None else weights
    _require_one_model(sources)
    _require_equal_integers(sources)
    return {
        name: _mean(name, sources, shares) if _has_mean(tensor) else tensor
        for name, tensor in sources[0].tensors.items()
    }


def round_once(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert float64 to `dtype` with a single rounding, to the nearest, ties to even.

    torch converts to the smaller types through float32 and so rounds twice, which is wrong near a tie. This function
    rounds to odd on the way (towards zero, with the last bit set if anything was cut off), which preserves the
    information for the second rounding.

    >>> near_a_tie = torch.tensor([1 + 2**-11 + 2**-40], dtype=torch.float64)
    >>> near_a_tie.to(torch.float16).item(), round_once(near_a_tie, torch.float16).item()
    (1.0, 1.0009765625)
    """
    if dtype in _ONE_ROUNDING_AWAY:
        return exact.to(dtype)
    nearest = exact.to(torch.float32)
    too_far = nearest.to(torch.float64).abs() > exact.abs()
    cut = torch.where(too_far, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)
    odd = (cut.view(torch.int32) | 1).view(torch.float32)
    return torch.where(cut.to(torch.float64) != exact, odd, cut).to(dtype)


def _require_one_model(sources: Sequence[Source]) -> None:
    first = sources[0]
    lines = [
        line
        for other in sources[1:]
        for line in differences(forms(first.tensors), str(first.path), forms(other.tensors), str(other.path))
    ]
    if lines:
        raise misfit("these are not weights of one model", lines, hint="average runs of the same job and settings")


def _require_equal_integers(sources: Sequence[Source]) -> None:
    first = sources[0]
    lines = [
        f"{name}: {first.path} and {other.path} hold other values"
        for other in sources[1:]
        for name, tensor in sorted(first.tensors.items())
        if not _has_mean(tensor) and not torch.equal(tensor, other.tensors[name])
    ]
    if lines:
        raise misfit(
            "tensors of whole numbers or booleans have no mean and must agree",
            lines,
            hint="counters such as BatchNorm's num_batches_tracked agree after the same number of steps",
        )


def _has_mean(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _mean(name: str, sources: Sequence[Source], shares: Sequence[float]) -> torch.Tensor:
    like = sources[0].tensors[name]
    total = torch.zeros(like.shape, dtype=torch.complex128 if like.is_complex() else torch.float64)
    for source, share in zip(sources, shares, strict=True):
        total += source.tensors[name].to(total.dtype) * share
    total /= sum(shares)
    if total.isnan().any():
        culprits = [str(source.path) for source in sources if source.tensors[name].isnan().any()]
        raise DistBeliefError(
            f"{name}: the average is not a number",
            hint=f"leave out {', '.join(culprits)}" if culprits else "the sources hold infinities of both signs",
        )
    return round_once(total, like.dtype)
