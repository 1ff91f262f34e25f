"""What is saved is what is loaded, however it was spread over parts; and what may be sealed."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import fsspec
import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from distbelief.checkpoint.faults import (
    CheckpointExists,
    CheckpointIncomplete,
    CheckpointMissing,
    StorageFailed,
)
from distbelief.checkpoint.manifest import Facts
from distbelief.checkpoint.parts import Slice
from distbelief.checkpoint.reading import (
    list_checkpoints,
    newest_sound,
    read_manifest,
    read_tensors,
    verify,
)
from distbelief.checkpoint.rules.boxes import Stretch, coverage_fault
from distbelief.checkpoint.saving import seal, write_part
from distbelief.errors import DistBeliefError
from tests.support.checkpoint.samples import FACTS, cut, files, same_bits, save, state


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "not made yet" / "checkpoints")
    else:
        yield "memory://checkpoints/of a run"
        fsspec.filesystem("memory").rm("/checkpoints", recursive=True)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_a_round_trip_keeps_every_bit(folder: str, parts: int) -> None:
    saved = state()
    manifest = save(folder, 120, saved, parts)
    assert verify(folder, 120) == manifest == read_manifest(folder, 120)
    assert same_bits(read_tensors(folder, manifest), saved)


def test_every_type_of_the_table_is_a_type_of_torch_and_of_safetensors(tmp_path: Path) -> None:
    from distbelief.checkpoint.manifest import DTYPES

    saved = {name: torch.ones(3, dtype=torch.uint8).to(getattr(torch, name)) for name in DTYPES}
    manifest = save(tmp_path, 1, saved, parts=1)
    with safe_open(tmp_path / "step-000000001" / manifest.parts[0].file, framework="pt") as file:
        opened = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    read = read_tensors(tmp_path, manifest)
    for name, tensor in saved.items():
        assert opened[name].dtype == read[name].dtype == tensor.dtype
        assert torch.equal(opened[name].view(torch.uint8), tensor.view(torch.uint8))
        assert torch.equal(read[name].view(torch.uint8), tensor.view(torch.uint8))


def test_parts_are_plain_safetensors_files(tmp_path: Path) -> None:
    saved = state()
    manifest = save(tmp_path, 120, saved, parts=2)
    assert files(tmp_path, 120) == [
        "manifest.json",
        "part-00001-of-00002.safetensors",
        "part-00002-of-00002.safetensors",
    ]
    with safe_open(tmp_path / "step-000000120" / manifest.parts[0].file, framework="pt") as file:
        assert torch.equal(file.get_tensor("float64[0:500]"), saved["float64"][:500])
        assert file.get_tensor("empty").shape == (0, 3)
    with safe_open(tmp_path / "step-000000120" / manifest.parts[1].file, framework="pt") as file:
        assert torch.equal(file.get_tensor("scalar"), saved["scalar"])


def test_the_manifest_is_plain_json_with_what_was_given(tmp_path: Path) -> None:
    save(tmp_path, 120)
    content = json.loads((tmp_path / "step-000000120" / "manifest.json").read_bytes())
    assert content["format_version"] == 1
    assert content["step"] == 120
    assert content["job"] == FACTS.job
    assert content["metrics"] == {"accuracy": 0.5}
    assert content["checksum"].startswith("sha256:")
    assert (
        content["parts"][0]["size_bytes"] == (tmp_path / "step-000000120" / content["parts"][0]["file"]).stat().st_size
    )


def test_a_metric_that_is_no_number_can_be_saved(tmp_path: Path) -> None:
    manifest = save(tmp_path, 1, facts=Facts(metrics={"loss": math.nan, "best": math.inf, "accuracy": 1.0}))
    assert manifest.metrics == {"loss": None, "best": None, "accuracy": 1.0}
    assert verify(tmp_path, 1) == manifest


def test_parameters_that_need_gradients_and_tied_ones_are_saved(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    parameters = {"a": layer.weight, "tied": layer.weight, "b": layer.bias}
    manifest = save(tmp_path, 1, parameters, parts=1)
    assert same_bits(read_tensors(tmp_path, manifest), {name: p.detach() for name, p in parameters.items()})


def test_steps_are_listed_newest_first_and_only_with_a_manifest(folder: str) -> None:
    assert list_checkpoints(folder) == []
    assert newest_sound(folder, verify) == (None, [])
    for step in (9, 10, 2_000_000_000):
        save(folder, step)
    write_part(folder, 11, 1, 1, [])
    assert list_checkpoints(folder) == [2_000_000_000, 10, 9]
    with pytest.raises(CheckpointMissing, match="no checkpoint of step 11"):
        read_manifest(folder, 11)


def test_an_empty_state_is_a_checkpoint_too(folder: str) -> None:
    manifest = seal(folder, 1, Facts(), [write_part(folder, 1, 1, 1, [])])
    assert verify(folder, 1) == manifest
    assert read_tensors(folder, manifest) == {}


def test_what_is_sealed_is_not_written_again(folder: str) -> None:
    save(folder, 5)
    with pytest.raises(CheckpointExists, match="step-000000005 is sealed already"):
        write_part(folder, 5, 1, 2, [])
    with pytest.raises(CheckpointExists):
        seal(folder, 5, FACTS, [])
    verify(folder, 5)


def test_sealing_again_after_a_lost_answer_finds_it_sealed(folder: str) -> None:
    records = [write_part(folder, 5, k, 2, slices) for k, slices in enumerate(cut(state(), 2), start=1)]
    manifest = seal(folder, 5, FACTS, records)
    assert seal(folder, 5, Facts(), records[::-1]) == manifest
    with pytest.raises(CheckpointExists):
        seal(folder, 5, FACTS, [msgspec.structs.replace(records[0], sha256="other"), records[1]])


def test_a_save_that_was_cut_short_is_saved_over_with_other_parts(folder: str) -> None:
    write_part(folder, 5, 1, 3, cut(state(1), 3)[0])
    save(folder, 5, state(2), parts=2)
    assert same_bits(read_tensors(folder, verify(folder, 5)), state(2))


def test_only_whole_and_single_coverage_is_sealed(tmp_path: Path) -> None:
    values = torch.arange(10.0)

    def sealed(step: int, *pieces: list[Slice]) -> None:
        records = [write_part(tmp_path, step, k, len(pieces), part) for k, part in enumerate(pieces, start=1)]
        seal(tmp_path, step, FACTS, records)

    def piece(first: int, last: int, shape: tuple[int, ...] = (10,), dtype: torch.dtype = torch.float32) -> Slice:
        return Slice("w", values[first:last].to(dtype), shape, first)

    for step, (pieces, message) in enumerate(
        [
            (([piece(0, 4)], [piece(5, 10)]), "elements 4 to 4 of tensor 'w' are in no part"),
            (([piece(0, 4)], [piece(4, 9)]), "elements 9 to 9 of tensor 'w' are in no part"),
            (([piece(0, 6)], [piece(4, 10)]), "elements 4 to 5 of tensor 'w' are in part 1 and in part 2"),
            (([piece(0, 10)], [piece(0, 10)]), "elements 0 to 9 of tensor 'w' are in part 1 and in part 2"),
            (([piece(0, 5)], [piece(5, 10, (2, 5))]), "tensor 'w' is 10 float32 in one part and 2×5 float32 in part 2"),
            (([piece(0, 5)], [piece(5, 10, dtype=torch.float64)]), "10 float32 in one part and 10 float64 in part 2"),
        ]
    ):
        with pytest.raises(CheckpointIncomplete) as caught:
            sealed(step, *pieces)
        assert message in caught.value.message
    assert list_checkpoints(tmp_path) == []


def test_a_part_that_is_gone_or_left_out_is_noticed_when_sealing(tmp_path: Path) -> None:
    records = [write_part(tmp_path, 1, k, 2, slices) for k, slices in enumerate(cut(state(), 2), start=1)]
    with pytest.raises(CheckpointIncomplete, match="not a complete set: part-00002-of-00002"):
        seal(tmp_path, 1, FACTS, records[1:])
    (tmp_path / "step-000000001" / records[0].file).unlink()
    with pytest.raises(CheckpointIncomplete, match=r"part-00001-of-00002\.safetensors is missing"):
        seal(tmp_path, 1, FACTS, records)
    assert list_checkpoints(tmp_path) == []


def test_slices_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    values = torch.ones(4)
    for slices in (
        [Slice("w", values, (3,))],
        [Slice("w", values, (8,), first=5)],
        [Slice("w", values[:0], (8,))],
        [Slice.whole("w", values), Slice.whole("w", values)],
        [Slice.whole("__metadata__", values)],
    ):
        with pytest.raises(ValueError, match=r"'w'|: w$|: __metadata__$"):
            write_part(tmp_path, 1, 1, 1, slices)
    with pytest.raises(DistBeliefError, match="'w' cannot be saved: its type is complex64"):
        write_part(tmp_path, 1, 1, 1, [Slice.whole("w", torch.ones(2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="no part 3 of 2"):
        write_part(tmp_path, 1, 3, 2, [])
    assert not list(tmp_path.iterdir())


def test_a_part_that_cannot_be_finished_leaves_nothing(tmp_path: Path) -> None:
    unreadable = Slice.whole("b", torch.empty(4, device="meta"))
    with pytest.raises(NotImplementedError):
        write_part(tmp_path, 1, 1, 1, [Slice.whole("a", torch.ones(4)), unreadable])
    assert files(tmp_path, 1) == []


@given(st.lists(st.integers(0, 20), max_size=6), st.data())
def test_exactly_the_cuts_of_a_tensor_cover_it(cuts: list[int], data: st.DataObject) -> None:
    bounds = sorted({0, 20, *cuts})
    stretches = [Stretch(1, a, b - a) for a, b in itertools.pairwise(bounds)]
    assert coverage_fault("w", (4, 5), data.draw(st.permutations(stretches))) == ""
    lost = data.draw(st.sampled_from(stretches))
    remaining = [stretch for stretch in stretches if stretch is not lost]
    assert coverage_fault("w", (20,), remaining).startswith(
        f"elements {lost.first} to {lost.first + lost.count - 1} of"
    )
    at = data.draw(st.integers(0, 19))
    assert f"elements {at} to {at} of" in coverage_fault("w", (20,), [*stretches, Stretch(2, at, 1)])


def test_tensors_that_are_not_wanted_are_left_out(tmp_path: Path) -> None:
    manifest = save(tmp_path, 1, {"model/w": torch.ones(2), "optimizer/w": torch.zeros(2)})
    assert same_bits(read_tensors(tmp_path, manifest, ["model/w"]), {"model/w": torch.ones(2)})


@pytest.mark.parametrize(
    ("url", "reason"), [("nonsense://x/y", "Protocol not known"), ("file:///proc/x", "No such file")]
)
def test_a_place_that_cannot_be_used_is_said(url: str, reason: str) -> None:
    with pytest.raises(StorageFailed, match=reason) as caught:
        write_part(url, 1, 1, 1, [])
    assert caught.value.hint


def test_a_local_path_may_have_any_characters(tmp_path: Path) -> None:
    folder = tmp_path / "~a::b*[c]"
    save(folder, 1)
    assert newest_sound(folder, verify)[0] == read_manifest(f"file://{folder}", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["~a::b*[c]"]
