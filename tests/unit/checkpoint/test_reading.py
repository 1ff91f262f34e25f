"""Checkpoints of boxes, and reading no more of one than is wanted."""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from distbelief.checkpoint import lazy as filling
from distbelief.checkpoint import parts as partreading
from distbelief.checkpoint.faults import CheckpointDamaged, CheckpointFormat, CheckpointIncomplete
from distbelief.checkpoint.manifest import Facts, Manifest, PartEntry, decode
from distbelief.checkpoint.parts import Slice
from distbelief.checkpoint.reading import list_checkpoints, open_checkpoint, read_manifest, read_tensors, verify
from distbelief.checkpoint.rules import boxes
from distbelief.checkpoint.rules.boxes import Box
from distbelief.checkpoint.saving import seal, write_part
from distbelief.checkpoint.storage import Where
from tests.support.checkpoint.boxes import boxes_within, pieces_of, same_bytes, tensors
from tests.support.checkpoint.memory import MIB, peak_growth_bytes
from tests.support.checkpoint.samples import FACTS, in_child, same_bits, save, state

FIRST, SECOND = "part-00001-of-00002.safetensors", "part-00002-of-00002.safetensors"


def save_pieces(folder: Where, step: int, *parts: list[Slice]) -> Manifest:
    records = [write_part(folder, step, k, len(parts), part) for k, part in enumerate(parts, start=1)]
    return seal(folder, step, FACTS, records)


def columns(name: str, tensor: torch.Tensor, members: int) -> list[Slice]:
    """As tensor parallelism holds it."""
    width = tensor.shape[1] // members
    cuts: list[Box] = [((0, tensor.shape[0]), (k * width, (k + 1) * width)) for k in range(members)]
    return [Slice.of_box(name, tensor[:, a:b], tensor.shape, box) for box in cuts for a, b in [box[1]]]


@pytest.fixture
def read_of(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """File -> how many of its bytes were read alone."""
    found: dict[str, int] = {}
    plain = LocalFileSystem.cat_file

    def counted(files: Any, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        data = bytes(plain(files, path, start=start, end=end, **more))
        found[os.path.basename(path)] = found.get(os.path.basename(path), 0) + len(data)
        return data

    monkeypatch.setattr(LocalFileSystem, "cat_file", counted)
    monkeypatch.setattr(partreading, "_HEADER_GUESS_BYTES", 8)
    return found


# --- what is written -------------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_cut_into_boxes_comes_back_and_any_box_of_it(data: st.DataObject) -> None:
    saved = {name: data.draw(tensors()) for name in ("a", "b")}
    parts: list[list[Slice]] = [[], [], []]
    for name, tensor in saved.items():
        for piece in data.draw(pieces_of(name, tensor)):
            parts[data.draw(st.integers(0, 2))].append(piece)
    folder = "memory://any"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partreading, "BLOCK_BYTES", data.draw(st.sampled_from([8, 24, 64, MIB])))
        patch.setattr(filling, "GAP_BYTES", data.draw(st.sampled_from([0, 3, MIB])))
        try:
            manifest = save_pieces(folder, 1, *parts)
            assert verify(folder, 1) == manifest
            found = read_tensors(folder, manifest)
            assert found.keys() == saved.keys()
            assert all(same_bytes(found[name], tensor) for name, tensor in saved.items())
            for check in (True, False):
                _, lazy = open_checkpoint(folder, 1, check)
                for _ in range(2):  # with `check`, the second time from parts that are trusted
                    wanted = {name: data.draw(boxes_within(tuple(tensor.shape))) for name, tensor in saved.items()}
                    for name, value in lazy.read_boxes(wanted).items():
                        whole = boxes.whole(saved[name].shape)
                        assert same_bytes(value, saved[name][boxes.inside(wanted[name], whole)])
        finally:
            fsspec.filesystem("memory").store.clear()


def test_a_box_is_one_entry_of_its_own_shape(tmp_path: Path) -> None:
    from safetensors import safe_open

    w = torch.arange(24.0).view(4, 6)
    manifest = save_pieces(tmp_path, 1, *([piece] for piece in columns("w", w, 2)))
    with safe_open(tmp_path / "step-000000001" / SECOND, framework="pt") as file:
        assert torch.equal(file.get_tensor("w[0:4,3:6]"), w[:, 3:])
    assert [(s.first, s.count, s.box) for s in manifest.tensors[0].stretches] == [
        (0, 12, ((0, 4), (0, 3))),
        (3, 12, ((0, 4), (3, 6))),
    ]


def test_boxes_that_are_stretches_make_a_checkpoint_that_older_programs_read(tmp_path: Path) -> None:
    w = torch.arange(24.0).view(4, 6)
    rows = [Slice.of_box("w", w[a:b], (4, 6), ((a, b), (0, 6))) for a, b in ((0, 3), (3, 4))]
    assert save_pieces(tmp_path, 1, rows).format_version == 1
    content = json.loads((tmp_path / "step-000000001" / "manifest.json").read_bytes())
    assert content["tensors"][0]["stretches"] == [
        {"part": 1, "first": 0, "count": 18},
        {"part": 1, "first": 18, "count": 6},
    ]
    assert same_bits(read_tensors(tmp_path, verify(tmp_path, 1)), {"w": w})


def test_boxes_make_a_checkpoint_that_older_programs_refuse_by_its_version(tmp_path: Path) -> None:
    assert save_pieces(tmp_path, 1, columns("w", torch.ones(4, 6), 2)).format_version == 2


@pytest.mark.parametrize("version", [1, 2])
def test_a_manifest_of_the_first_format_is_still_read(tmp_path: Path, version: int) -> None:
    """Its very bytes, as they were written before there were boxes; and the same in the words of the second format."""
    w = torch.arange(6.0).view(2, 3)
    records = [write_part(tmp_path, 1, 1, 1, [Slice.whole("w", w)])]
    body = (
        f'{{"format_version":{version},"step":1,"created":"2026-11-15T00:00:00Z","job":{{}},"data":{{}},"random":{{}},'
        f'"versions":{{}},"metrics":{{}},"parts":[{{"file":"{records[0].file}","size_bytes":{records[0].size_bytes},'
        f'"sha256":"{records[0].sha256}"}}],"tensors":[{{"name":"w","dtype":"float32","shape":[2,3],'
        f'"stretches":[{{"part":1,"first":0,"count":6}}]}}]'
    ).encode()
    mark = f',"checksum":"sha256:{hashlib.sha256(body).hexdigest()}"}}'.encode()
    (tmp_path / "step-000000001" / "manifest.json").write_bytes(body + mark)
    assert same_bits(read_tensors(tmp_path, verify(tmp_path, 1)), {"w": w})


def test_a_manifest_of_the_first_format_has_no_boxes(tmp_path: Path) -> None:
    save_pieces(tmp_path, 1, columns("w", torch.ones(4, 6), 2))
    body = (tmp_path / "step-000000001" / "manifest.json").read_bytes().rpartition(b',"checksum"')[0]
    for version, kind, said in (
        (b"1", CheckpointDamaged, "it has boxes of tensors, which format 1 does not allow"),
        (b"3", CheckpointFormat, "is in the newer checkpoint format 3; this version reads formats 1 to 2"),
    ):
        other = body.replace(b'"format_version":2', b'"format_version":' + version)
        mark = f',"checksum":"sha256:{hashlib.sha256(other).hexdigest()}"}}'.encode()
        with pytest.raises(kind) as caught:
            decode(other + mark, "x", 1)
        assert said in caught.value.message


def test_an_empty_box_is_not_written(tmp_path: Path) -> None:
    """With more members than rows, some hold none; and the one who seals is told so too."""
    w = torch.arange(6.0).view(2, 3)
    held: list[Box] = [((0, 1), (0, 3)), ((1, 2), (0, 3)), ((2, 2), (0, 3))]
    parts = [[Slice.of_box("w", w[a:b], (2, 3), box)] for box in held for a, b in [box[0]]]
    records = [write_part(tmp_path, 1, k, 3, part) for k, part in enumerate(parts, start=1)]
    assert records[2].entries == ()
    told = [
        type(record)(record.file, record.size_bytes, record.sha256, (PartEntry.of_box("w", "float32", (2, 3), box),))
        for record, box in zip(records, held, strict=True)
    ]
    manifest = seal(tmp_path, 1, Facts(), told)
    assert [s.part for s in manifest.tensors[0].stretches] == [1, 2]
    assert same_bits(read_tensors(tmp_path, verify(tmp_path, 1)), {"w": w})


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 3, 0), (0, 3)])
def test_boxes_of_a_tensor_without_elements(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Two members hold halves of nothing."""
    halves = []
    for low, high in ((0, shape[0] // 2), (shape[0] // 2, shape[0])):
        box = ((low, high), *boxes.whole(shape[1:]))
        halves.append([Slice.of_box("w", torch.empty(boxes.sizes(box)), shape, box)])
    manifest = save_pieces(tmp_path, 1, *halves)
    assert same_bits(read_tensors(tmp_path, manifest), {"w": torch.empty(shape)})
    assert verify(tmp_path, 1) == manifest


def test_boxes_that_leave_something_out_or_hold_it_twice_are_not_sealed(tmp_path: Path) -> None:
    w = torch.arange(24.0).view(4, 6)
    left, right = columns("w", w, 2)
    more = Slice.of_box("w", w[:, 2:], (4, 6), ((0, 4), (2, 6)))
    with pytest.raises(CheckpointIncomplete, match=r"elements \[0:4,3:6\] of tensor 'w' are in no part"):
        save_pieces(tmp_path, 1, [left], [])
    with pytest.raises(CheckpointIncomplete, match=r"elements \[0:4,2:3\] of tensor 'w' are in part 1 and in part 2"):
        save_pieces(tmp_path, 2, [left], [more])
    with pytest.raises(CheckpointIncomplete, match=r"\[0:4,0:3\] of tensor 'w' are in part 1 and in part 2"):
        save_pieces(tmp_path, 3, [left], [left, right])
    assert list_checkpoints(tmp_path) == []


def test_boxes_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    values = torch.ones(2, 3)
    for box in (((0, 2), (0, 2)), ((0, 2),), ((3, 5), (0, 3)), ((0, 2), (-3, 0))):
        with pytest.raises(ValueError, match="'w'"):
            Slice.of_box("w", values, (4, 3), box)
    for shape, box in (((4, 4), ((0, 2), (0, 2))), ((4, 2), ((0, 2), (0, 3)))):
        with pytest.raises(ValueError, match="'w'"):
            write_part(tmp_path, 1, 1, 1, [Slice("w", values, shape, 0, box)])
    assert not list(tmp_path.iterdir())


# --- what is read ----------------------------------------------------------------------------------------------------


def test_names_types_and_shapes_are_known_without_reading(tmp_path: Path) -> None:
    saved = state()
    save(tmp_path, 1, saved)
    for part in (FIRST, SECOND):
        (tmp_path / "step-000000001" / part).unlink()
    _, lazy = open_checkpoint(tmp_path, 1)
    assert set(lazy) == saved.keys()
    assert len(lazy) == len(saved)
    assert "float32" in lazy
    assert "other" not in lazy
    assert lazy.outlines == {name: (t.dtype, tuple(t.shape)) for name, t in saved.items()}
    with pytest.raises(CheckpointDamaged, match="is missing"):
        lazy["float32"]


def test_it_is_a_mapping_of_tensors(tmp_path: Path) -> None:
    saved = state()
    save(tmp_path, 1, saved, parts=3)
    for check in (True, False):
        _, lazy = open_checkpoint(tmp_path, 1, check)
        assert same_bits(dict(lazy.items()), saved)
        assert same_bits(lazy.read_whole(), saved)
    with pytest.raises(KeyError):
        lazy["other"]
    with pytest.raises(ValueError, match=r"'float64' of shape .* has no box"):
        lazy.read_box("float64", ((0, 1001),))
    with pytest.raises(ValueError, match="has no box"):
        lazy.read_box("float64", ())


def test_trusted_rows_are_read_and_nothing_else(tmp_path: Path, read_of: dict[str, int]) -> None:
    w = torch.randn(64, 1024)
    save_pieces(tmp_path, 1, [Slice.of_box("w", w[:40], (64, 1024), ((0, 40), (0, 1024)))], [
        Slice.of_box("w", w[40:], (64, 1024), ((40, 64), (0, 1024))), Slice.whole("v", torch.ones(100_000))
    ])  # fmt: skip
    _, lazy = open_checkpoint(tmp_path, 1, check=False)
    assert torch.equal(lazy.read_box("w", ((10, 12), (0, 1024))), w[10:12])
    header = int.from_bytes((tmp_path / "step-000000001" / FIRST).read_bytes()[:8], "little") + 8
    assert read_of[FIRST] == header + 2 * 4096
    assert SECOND not in read_of
    assert torch.equal(lazy.read_box("w", ((38, 41), (0, 1024))), w[38:41])
    assert read_of[FIRST] == header + 4 * 4096


def test_trusted_columns_are_read_alone_where_much_lies_between_them(tmp_path: Path, read_of: dict[str, int]) -> None:
    w = torch.randn(4, MIB)
    save_pieces(tmp_path, 1, [Slice.whole("w", w)], [])
    _, lazy = open_checkpoint(tmp_path, 1, check=False)
    assert torch.equal(lazy.read_box("w", ((0, 4), (100, 300))), w[:, 100:300])
    assert read_of[FIRST] < 4 * 800 + 1000


def test_what_is_wanted_first_is_checked_and_then_trusted(tmp_path: Path, read_of: dict[str, int]) -> None:
    w = torch.randn(8, 6)
    save_pieces(tmp_path, 1, *([piece] for piece in columns("w", w, 2)))
    _, lazy = open_checkpoint(tmp_path, 1)
    assert torch.equal(lazy.read_box("w", ((0, 8), (0, 2))), w[:, :2])
    assert FIRST not in read_of  # as a stream, all of it
    damage(tmp_path / "step-000000001" / FIRST)
    assert lazy.read_box("w", ((0, 1), (0, 1))).shape == (1, 1)
    assert read_of[FIRST] < 100
    damage(tmp_path / "step-000000001" / SECOND)
    with pytest.raises(CheckpointDamaged, match=f"{SECOND} is damaged: its checksum differs"):
        lazy.read_box("w", ((0, 1), (4, 5)))
    assert read_tensors(tmp_path, read_manifest(tmp_path, 1), []) == {}


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_members_can_divide_the_checking(tmp_path: Path) -> None:
    save(tmp_path, 1, state(), parts=2)
    damage(tmp_path / "step-000000001" / SECOND)
    _, lazy = open_checkpoint(tmp_path, 1, check=False)
    lazy.check_parts([1])
    with pytest.raises(CheckpointDamaged, match=f"{SECOND} is damaged"):
        lazy.check_parts([2])
    with pytest.raises(CheckpointDamaged, match=f"{SECOND} is damaged"):
        lazy.check(["float64"])
    with pytest.raises(CheckpointDamaged, match=f"{SECOND} is damaged"):
        lazy.check()


@pytest.mark.parametrize("check", [True, False])
def test_parts_that_are_gone_torn_or_of_something_else_are_named(tmp_path: Path, check: bool) -> None:
    save(tmp_path, 1, state(1))
    path = tmp_path / "step-000000001" / FIRST
    whole = path.read_bytes()
    other = tmp_path / "step-000000002" / FIRST
    save(tmp_path, 2, {name: t for name, t in state(2).items() if name != "bool"})

    def fault() -> str:
        _, lazy = open_checkpoint(tmp_path, 1, check)
        with pytest.raises(CheckpointDamaged) as caught:
            lazy["float64"]
        return caught.value.message

    path.write_bytes(whole[:-1])
    assert fault() == f"{path} is torn: it has {len(whole) - 1} of {len(whole)} bytes"
    path.write_bytes(whole + b"x")
    assert fault() == f"{path} is too long: it has {len(whole) + 1} of {len(whole)} bytes"
    path.write_bytes(other.read_bytes() + bytes(len(whole) - other.stat().st_size))
    assert fault() == f"{path} is damaged: its checksum differs" if check else "does not match the manifest" in fault()
    path.write_bytes(b"\xff" * len(whole))
    assert fault() == f"{path} is damaged: its checksum differs" if check else "does not match the manifest" in fault()
    path.unlink()
    assert fault() == f"{path} is missing"


def test_a_part_that_is_removed_or_cut_off_after_its_check(tmp_path: Path) -> None:
    save(tmp_path, 1, state(1))
    _, lazy = open_checkpoint(tmp_path, 1)
    lazy.check()
    path = tmp_path / "step-000000001" / FIRST
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointDamaged, match=f"{FIRST} is torn: it ends before byte"):
        lazy["float64"]
    path.unlink()
    with pytest.raises(CheckpointDamaged, match=f"{FIRST} is missing"):
        lazy["float64"]


def test_a_box_that_reaches_beyond_an_entry_in_an_inner_dimension(tmp_path: Path) -> None:
    w = torch.arange(16.0).view(2, 4, 2)
    halves: list[Box] = [((0, 2), (2, 4), (0, 2)), ((0, 2), (0, 2), (0, 2))]
    save_pieces(tmp_path, 1, [Slice.of_box("w", w[:, a:b], w.shape, box) for box in halves for a, b in [box[1]]])
    for check in (True, False):
        _, lazy = open_checkpoint(tmp_path, 1, check)
        assert torch.equal(lazy.read_box("w", ((0, 1), (0, 4), (0, 2))), w[:1])
        assert torch.equal(lazy.read_box("w", ((1, 2), (1, 4), (0, 2))), w[1:, 1:])


def test_one_box_from_many_parts_and_many_boxes_from_one(tmp_path: Path) -> None:
    drawn = random.Random(0)
    w = torch.randn(32, 48)
    pieces = columns("w", w, 8)
    drawn.shuffle(pieces)
    save_pieces(tmp_path, 1, *([piece] for piece in pieces))
    _, lazy = open_checkpoint(tmp_path, 1)
    assert torch.equal(lazy.read_box("w", ((5, 9), (3, 40))), w[5:9, 3:40])
    same = [("w", ((0, 4), (0, 48))), ("w", ((2, 6), (1, 3))), ("w", ((2, 6), (1, 3)))]
    assert all(torch.equal(a, b) for a, b in zip(lazy.read(same), [w[:4], w[2:6, 1:3], w[2:6, 1:3]], strict=True))
    assert lazy.read([]) == []


@pytest.mark.parametrize("check", [True, False])
def test_memory_holds_what_is_wanted_and_a_few_blocks(tmp_path: Path, check: bool) -> None:
    w = torch.ones(4096, 4096)  # 64 MiB
    save_pieces(tmp_path, 1, [Slice.whole("w", w)], [Slice.whole("v", w)])
    quarter: Box = ((0, 4096), (100, 356))  # 4 MiB, of every row

    def trial() -> tuple[int, int]:
        manifest, lazy = open_checkpoint(tmp_path, 1, check)
        lazy.read_box("w", ((0, 1), (0, 1)))  # what is imported on the way
        _, lazy = open_checkpoint(tmp_path, 1, check)
        box = peak_growth_bytes(lambda: lazy.read_boxes({"w": quarter, "v": quarter}))
        return box, peak_growth_bytes(lambda: read_tensors(tmp_path, manifest))

    box, everything = in_child(trial)
    assert box < 64 * MIB  # freed memory may stay with the process for a while
    assert everything > 120 * MIB
