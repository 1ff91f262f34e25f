"""A file of weights, read by name and by box, near and far."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distbelief.checkpoint import lazy as filling
from distbelief.checkpoint import parts as partreading
from distbelief.checkpoint.rules import boxes
from distbelief.checkpoint.sources import open_weights
from distbelief.checkpoint.weights import KINDS, save_tensors
from distbelief.errors import DistBeliefError
from tests.support.checkpoint.boxes import boxes_within, same_bytes, tensors
from tests.support.checkpoint.memory import MIB, peak_growth_bytes
from tests.support.checkpoint.samples import in_child, same_bits


@given(st.dictionaries(st.sampled_from("abcd"), tensors(), min_size=1), st.data())
@settings(deadline=None)
def test_any_box_of_what_safetensors_wrote(saved: dict[str, torch.Tensor], data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partreading, "BLOCK_BYTES", data.draw(st.sampled_from([8, 64, MIB])))
        patch.setattr(partreading, "_HEADER_GUESS_BYTES", data.draw(st.sampled_from([8, 100, MIB])))
        patch.setattr(filling, "GAP_BYTES", data.draw(st.sampled_from([0, 3, MIB])))
        fsspec.filesystem("memory").pipe("/any/w.safetensors", safetensors.torch.save(saved))
        lazy = open_weights("memory://any/w.safetensors")
        assert lazy.outlines == {name: (t.dtype, tuple(t.shape)) for name, t in saved.items()}
        wanted = {name: data.draw(boxes_within(tuple(tensor.shape))) for name, tensor in saved.items()}
        for name, value in lazy.read_boxes(wanted).items():
            assert same_bytes(value, saved[name][boxes.inside(wanted[name], boxes.whole(saved[name].shape))])
        assert all(same_bytes(value, saved[name]) for name, value in lazy.items())


def test_every_type(tmp_path: Path) -> None:
    saved = {name: torch.ones(2, 3, dtype=torch.uint8).to(getattr(torch, name)) for name in KINDS}
    save_tensors(saved, tmp_path / "w.safetensors")
    lazy = open_weights(tmp_path / "w.safetensors")
    assert all(same_bytes(lazy[name], tensor) for name, tensor in saved.items())
    assert all(same_bytes(lazy.read_box(name, ((0, 2), (1, 2))), tensor[:, 1:2]) for name, tensor in saved.items())


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"v":{"dtype":"U8","shape":[1],"data_offsets":[4,5]}}',
         "'v' lies at other bytes"),
        (b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,7]}}', "it has 8 bytes of data where 7 belong"),
        (b'{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', "'w' has 8 bytes, which is not right"),
        (b'{"w":{"dtype":"F32","shape":[-1,-2],"data_offsets":[0,8]}}', "'w' has 8 bytes, which is not right"),
        (b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}', "'w' lies at other bytes"),
        (b'{"w":{"dtype":"F4","shape":[16],"data_offsets":[0,8]}}', "of the type F4, which is not known here"),
        (b'{"w":"F32"}', "its header cannot be read"),
        (b"[1, 2]", "its header cannot be read"),
    ],
)  # fmt: skip
def test_a_header_that_cannot_be_right(tmp_path: Path, header: bytes, said: str) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(DistBeliefError) as caught:
        open_weights(path)
    assert said in caught.value.message
    assert str(path) in caught.value.message


def test_a_file_that_is_not_there_or_cut_off_later(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    with pytest.raises(DistBeliefError, match=r"there is no .*w.safetensors"):
        open_weights(path)
    save_tensors({"w": torch.zeros(100)}, path)
    lazy = open_weights(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DistBeliefError, match=r"w.safetensors is damaged, .*it ends before byte") as caught:
        lazy["w"]
    assert "checkpoint" not in caught.value.hint


def test_memory_holds_what_is_wanted_and_a_block(tmp_path: Path) -> None:
    save_tensors({"w": torch.ones(4096, 4096)}, tmp_path / "w.safetensors")

    def trial() -> tuple[int, int]:
        lazy = open_weights(tmp_path / "w.safetensors")
        lazy.read_box("w", ((0, 1), (0, 1)))
        box = peak_growth_bytes(lambda: lazy.read_box("w", ((0, 4096), (100, 356))))
        return box, peak_growth_bytes(lambda: lazy["w"])

    box, everything = in_child(trial)
    assert box < 32 * MIB  # freed memory may stay with the process for a while
    assert everything > 60 * MIB


def test_it_can_be_copied_tensor_by_tensor(tmp_path: Path) -> None:
    saved = {"b": torch.randn(3), "a": torch.ones(2, dtype=torch.int64)}
    save_tensors(saved, tmp_path / "a.safetensors")
    save_tensors(open_weights(tmp_path / "a.safetensors"), tmp_path / "b.safetensors")
    assert same_bits(safetensors.torch.load_file(tmp_path / "b.safetensors"), saved)
