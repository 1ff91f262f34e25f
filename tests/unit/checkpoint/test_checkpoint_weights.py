"""Weights as a hash and as a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from distbelief.checkpoint.weights import save_weights, weights_sha256


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.small = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.ones(0))


def test_the_hash_sees_every_part() -> None:
    first = weights_sha256(Net())
    assert weights_sha256(Net()) == first

    def changed(change: object) -> str:
        net = Net()
        change(net)  # type: ignore[operator]
        return weights_sha256(net)

    with torch.no_grad():
        seen = {
            changed(lambda net: net.first.weight[0].add_(1)),
            changed(lambda net: net.norm.running_mean.add_(1)),
            changed(lambda net: net.norm.num_batches_tracked.add_(1)),
            changed(lambda net: net.mask.zero_()),
            changed(lambda net: setattr(net, "small", nn.Parameter(net.small.float()))),
            changed(lambda net: setattr(net, "small", nn.Parameter(net.small.view(1, 2)))),
            changed(lambda net: setattr(net, "other", nn.Parameter(torch.ones(0)))),
        }
    assert len(seen | {first}) == 8


def test_the_file_is_what_load_state_dict_wants(tmp_path: Path) -> None:
    net = Net()
    save_weights(net, tmp_path / "weights.safetensors")
    other = Net()
    with torch.no_grad():
        other.first.weight.zero_()
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert weights_sha256(other) == weights_sha256(net)
    assert [p.name for p in tmp_path.iterdir()] == ["weights.safetensors"]


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="nowhere"):
        save_weights(Net(), tmp_path / "nowhere" / "weights.safetensors")
