"""Weights as a hash and as a file."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from distbelief.checkpoint import weights
from distbelief.checkpoint.lazy import Outline, outlines_of
from distbelief.checkpoint.weights import (
    Streamed,
    WeightsDigest,
    named_tensors,
    persistent_tensors,
    save_tensors,
    save_weights,
    weights_sha256,
    weights_sha256_of,
    write_weights,
)
from distbelief.errors import DistBeliefError


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


def one_by_one(net: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """As a first rank gathers them: each is gone when the next one comes."""
    for name, tensor in named_tensors(net).items():
        gathered = tensor.clone()
        yield name, gathered
        gathered.zero_()


def test_a_stream_of_tensors_makes_the_same_file_and_the_same_hash(tmp_path: Path) -> None:
    net = Net()
    whole, streamed = tmp_path / "whole.safetensors", tmp_path / "streamed.safetensors"
    assert save_weights(net, whole) == weights_sha256(net)
    digest = write_weights(streamed, outlines_of(persistent_tensors(net)), one_by_one(net))
    assert digest == weights_sha256(net) == weights_sha256_of(one_by_one(net))
    assert streamed.read_bytes() == whole.read_bytes()
    assert "mask" not in load_file(streamed)
    assert load_file(streamed)["second.weight"].equal(net.first.weight)


def test_every_type_of_a_file_is_one_of_safetensors(tmp_path: Path) -> None:
    saved = {name: torch.ones(2, 3, dtype=torch.uint8).to(getattr(torch, name)) for name in weights.KINDS}
    save_tensors(saved, tmp_path / "w.safetensors")
    found = load_file(tmp_path / "w.safetensors")
    for name, tensor in saved.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
    with pytest.raises(DistBeliefError, match="'w' cannot be saved: its type is complex128"):
        save_tensors({"w": torch.ones(1, dtype=torch.complex128)}, tmp_path / "other.safetensors")


def test_tensors_of_any_strides(tmp_path: Path) -> None:
    saved = {"turned": torch.arange(6.0).view(2, 3).t(), "scalar": torch.tensor(2), "none": torch.empty(0, 3)}
    save_tensors(saved, tmp_path / "w.safetensors")
    found = load_file(tmp_path / "w.safetensors")
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())


F32 = torch.float32


@pytest.mark.parametrize(
    ("outlines", "said"),
    [
        ({"a": (F32, (2,)), "b": (F32, (2,)), "c": (F32, (2,))}, "these tensors are missing: c"),
        ({"a": (F32, (3,)), "b": (F32, (2,))}, r"'a' is torch.float32 \(2,\), not torch.float32 \(3,\)"),
        ({"a": (torch.int32, (2,)), "b": (F32, (2,))}, "'a' is torch.float32 .* not torch.int32"),
    ],
)
def test_a_stream_that_is_not_as_announced_leaves_no_file(
    tmp_path: Path, outlines: dict[str, Outline], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        write_weights(tmp_path / "w.safetensors", outlines, [("a", torch.ones(2)), ("b", torch.ones(2))])
    assert list(tmp_path.iterdir()) == []


def test_names_come_in_order(tmp_path: Path) -> None:
    pairs = [("b", torch.ones(2)), ("a", torch.ones(2))]
    for order in (pairs, [pairs[0], pairs[0]]):
        with pytest.raises(ValueError, match="tensors come in name order"):
            weights_sha256_of(order)
        with pytest.raises(ValueError, match="tensors come in name order"):
            write_weights(tmp_path / "w.safetensors", outlines_of(dict(order)), order)
    assert WeightsDigest().hexdigest() == weights_sha256_of([])


def test_a_stream_that_fails_is_not_called_a_failure_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_text("old")

    def lost() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        raise ConnectionError("a member is gone")

    with pytest.raises(ConnectionError, match="a member is gone"):
        write_weights(tmp_path / "w.safetensors", {"a": (F32, (2,)), "b": (F32, (2,))}, lost())
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("w.safetensors", "old")]


@pytest.mark.parametrize("position", [0, 20, -1])
def test_a_byte_that_is_not_what_was_written_is_noticed(tmp_path: Path, position: int) -> None:
    """Between the writing and the reading back, the last tensor's generator changes the draft."""

    def meddling() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        draft = next(tmp_path.iterdir())
        content = bytearray(draft.read_bytes())
        content[position] ^= 1
        draft.write_bytes(content)

    with pytest.raises(DistBeliefError, match=r"w.safetensors has other bytes when it is read back"):
        write_weights(tmp_path / "w.safetensors", {"a": (F32, (2,))}, meddling())
    assert list(tmp_path.iterdir()) == []


def test_only_one_of_the_tensors_is_in_memory(tmp_path: Path) -> None:
    names = [f"w{k}" for k in range(4)]
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            assert not alive
            made = [torch.ones(4)]
            alive.add(made[0])
            yield name, made.pop()

    write_weights(tmp_path / "w.safetensors", dict.fromkeys(names, (F32, (4,))), counted())
    weights_sha256_of(counted())


def test_a_tensor_in_blocks_is_saved_as_one_that_is_whole(tmp_path: Path) -> None:
    model, whole = torch.nn.Linear(2, 1), torch.arange(12.0).reshape(6, 2)
    blocks = [whole[:4].numpy().tobytes(), whole[4:].numpy().tobytes()]
    empty = torch.from_numpy(np.sort(np.zeros(0, np.int64)))  # of stride 0
    streamed = {"a.rows": empty, "table": Streamed(torch.float32, (6, 2), iter(blocks))}
    one = save_weights(model, tmp_path / "one.safetensors", streamed)
    other = save_weights(model, tmp_path / "other.safetensors", {"a.rows": empty, "table": whole})
    assert one == other != weights_sha256(model)
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "other.safetensors").read_bytes()
    assert torch.equal(load_file(tmp_path / "one.safetensors")["table"], whole)
    with pytest.raises(DistBeliefError, match="has other bytes when it is read back"):
        save_weights(model, tmp_path / "short.safetensors", {"z": Streamed(torch.float32, (6, 2), iter(blocks[:1]))})
    assert not (tmp_path / "short.safetensors").exists()


def test_a_full_disk_is_waited_for_before_the_first_tensor_is_asked_for(tmp_path: Path) -> None:
    """In a process of its own, whose files cannot grow at first."""
    script = """
import resource, sys, threading, time
from pathlib import Path
import torch
from distbelief.checkpoint.lazy import outlines_of
from distbelief.checkpoint.weights import weights_sha256_of, write_weights
from distbelief.errors import DistBeliefError
tensors = {"a": torch.ones(1000), "b": torch.zeros(7)}
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
asked = []
def stream():
    for name in tensors:
        asked.append(name)
        yield name, tensors[name]
path = Path(sys.argv[1])
try:
    write_weights(path, outlines_of(tensors), stream())
except DistBeliefError as error:
    assert "File too large" in error.message and "distbelief resume RUN" in error.hint, error.message
assert not asked and not list(path.parent.iterdir())
class Tee:  # room is made as soon as it says that it waits
    def write(self, text):
        sys.stderr.write(text)
        if "waits 300 s for room" in text:
            assert not asked
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    def flush(self): pass
sys.stdout = Tee()
assert write_weights(path, outlines_of(tensors), stream(), 300.0) == weights_sha256_of(tensors.items())
assert asked == ["a", "b"]
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "w.safetensors")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "it waits 300 s for room" in done.stderr
    assert load_file(tmp_path / "w.safetensors")["a"].sum() == 1000
