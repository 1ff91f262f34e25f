"""Models that no shard can be computed of are refused with the parameter's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distbelief.errors import JobError
from distbelief.strategies.flatmodel.compute import make_model
from tests.support.purity import job_of


class Rotated(nn.Module):
    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=trained)
        self.leave = nn.Linear(2, 2)


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.LazyLinear(2))


def made_by_a_batch() -> nn.Module:
    model = lazy()
    model(torch.zeros(2, 6))
    return model


@pytest.mark.parametrize(
    ("model", "message", "hint"),
    [
        (lazy, "'1.weight' has no shape yet: its layer is lazy", "runs one batch through it"),
        (nn.LazyBatchNorm1d, "'weight' has no shape yet", "runs one batch through it"),
        (Rotated, "the parameter 'turn' is complex", "torch.view_as_complex"),
    ],
)
def test_what_is_refused_is_named(model: Any, message: str, hint: str) -> None:
    with pytest.raises(JobError, match=message) as caught:
        make_model(job_of(model), torch.device("cpu"))
    assert hint in caught.value.hint


@pytest.mark.parametrize("model", [made_by_a_batch, lambda: Rotated(trained=False)])
def test_the_way_out_and_frozen_complex_numbers_are_taken(model: Any) -> None:
    assert make_model(job_of(model), torch.device("cpu")).training
