"""Checkpoints in S3, against a server on loopback."""

from __future__ import annotations

import os
from collections.abc import Iterator

import fsspec
import pytest
import s3fs
import safetensors.torch
import torch

from distbelief.checkpoint.faults import CheckpointDamaged, StorageFailed
from distbelief.checkpoint.parts import Slice
from distbelief.checkpoint.reading import list_checkpoints, newest_sound, open_checkpoint, read_tensors, verify
from distbelief.checkpoint.saving import delete, seal, tidy, write_part
from distbelief.checkpoint.sources import open_weights, read_source
from tests.support.checkpoint.s3 import Gate, s3_server
from tests.support.checkpoint.samples import FACTS, cut, same_bits, save, state

FOLDER = "s3://training/runs/digits/checkpoints"
MIB = 1 << 20


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def gate(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Every s3:// of this process goes through the gate, to an empty bucket; few retries, small uploads."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    with Gate(port) as gate:
        settings = {
            "endpoint_url": f"http://127.0.0.1:{gate.port}",
            "key": "a key",
            "secret": "a secret",
            "default_block_size": 5 * MIB,
        }
        monkeypatch.setitem(fsspec.config.conf, "s3", settings)
        s3fs.S3FileSystem.clear_instance_cache()
        store = fsspec.filesystem("s3")
        store.mkdir("training")
        yield gate
        if gate.is_shut:
            gate.reopen()
        store.rm("training", recursive=True)
        s3fs.S3FileSystem.clear_instance_cache()


def large(seed: int) -> dict[str, torch.Tensor]:
    """Parts of this are uploaded in several requests."""
    return {f"w{n}": torch.full((3 * MIB,), float(seed + n)) for n in range(2)}


@pytest.mark.usefixtures("gate")
def test_saved_verified_and_loaded() -> None:
    assert newest_sound(FOLDER, verify) == (None, [])
    for step in (1, 2):
        save(FOLDER, step, state(step), parts=3)
    manifest, skipped = newest_sound(FOLDER, verify)
    assert manifest == verify(FOLDER, 2)
    assert skipped == []
    assert same_bits(read_tensors(FOLDER, manifest), state(2))


@pytest.mark.usefixtures("gate")
def test_a_part_of_several_uploads() -> None:
    saved = large(1)
    manifest = save(FOLDER, 1, saved)
    assert manifest.parts[0].size_bytes > 10 * MIB
    assert same_bits(read_tensors(FOLDER, manifest), saved)


@pytest.mark.usefixtures("gate")
def test_damage_is_named_and_skipped() -> None:
    store = fsspec.filesystem("s3")
    for step in (1, 2, 3, 4):
        save(FOLDER, step)
    part = "part-00002-of-00002.safetensors"
    store.rm_file(f"{FOLDER}/step-000000002/{part}")
    content = store.cat_file(f"{FOLDER}/step-000000003/{part}")
    store.pipe_file(f"{FOLDER}/step-000000003/{part}", content[:-1])
    store.pipe_file(f"{FOLDER}/step-000000004/{part}", content[:-1] + bytes([content[-1] ^ 1]))
    manifest, skipped = newest_sound(FOLDER, verify)
    assert manifest is not None
    assert manifest.step == 1
    assert skipped == [
        (4, f"{FOLDER}/step-000000004/{part} is damaged: its checksum differs"),
        (3, f"{FOLDER}/step-000000003/{part} is torn: it has {len(content) - 1} of {len(content)} bytes"),
        (2, f"{FOLDER}/step-000000002/{part} is missing"),
    ]
    with pytest.raises(CheckpointDamaged, match="missing"):
        verify(FOLDER, 2)


@pytest.mark.usefixtures("gate")
def test_deleting_and_tidying() -> None:
    write_part(FOLDER, 1, 1, 2, cut(state(), 2)[0])
    save(FOLDER, 2)
    save(FOLDER, 3)
    assert tidy(FOLDER) == [1]
    delete(FOLDER, 2)
    assert list_checkpoints(FOLDER) == [3]
    found = fsspec.filesystem("s3").find(FOLDER)
    assert {path.split("/")[-2] for path in found} == {"step-000000003"}


@pytest.mark.parametrize("uploaded", [1 * MIB, 7 * MIB, 14 * MIB])
def test_the_server_goes_in_the_middle_of_a_save(gate: Gate, uploaded: int) -> None:
    """In the first request of a part, in a later one, and in the second part; then the server is back."""
    save(FOLDER, 1, state(1))
    gate.shut_after(uploaded)
    with pytest.raises(StorageFailed) as caught:
        save(FOLDER, 2, large(2))
    part = "part-00002-of-00002" if uploaded > 13 * MIB else "part-00001-of-00002"
    assert gate.is_shut
    assert caught.value.message.startswith(f"cannot write {FOLDER}/step-000000002/{part}.safetensors: ")
    assert "whether the store is up" in caught.value.hint
    with pytest.raises(StorageFailed, match="cannot list s3://training"):
        newest_sound(FOLDER, verify)

    gate.reopen()
    whole = ["part-00001-of-00002.safetensors"] if uploaded > 13 * MIB else []
    assert [path.split("/")[-1] for path in fsspec.filesystem("s3").find(f"{FOLDER}/step-000000002")] == whole
    manifest, skipped = newest_sound(FOLDER, verify)
    assert manifest is not None
    assert (manifest.step, skipped) == (1, [])
    assert same_bits(read_tensors(FOLDER, manifest), state(1))
    save(FOLDER, 2, large(2))
    manifest, _ = newest_sound(FOLDER, verify)
    assert manifest is not None
    assert same_bits(read_tensors(FOLDER, manifest), large(2))


def test_the_server_goes_before_the_manifest(gate: Gate) -> None:
    save(FOLDER, 1)
    records = [write_part(FOLDER, 2, k, 2, slices) for k, slices in enumerate(cut(state(2), 2), start=1)]
    gate.shut()
    with pytest.raises(StorageFailed):
        seal(FOLDER, 2, FACTS, records)
    gate.reopen()
    assert list_checkpoints(FOLDER) == [1]
    assert seal(FOLDER, 2, FACTS, records) == verify(FOLDER, 2)


def test_the_server_goes_in_the_middle_of_a_load(gate: Gate) -> None:
    manifest = save(FOLDER, 1, state(1))
    gate.shut_after(2000)
    with pytest.raises(StorageFailed, match=r"cannot (list|read) s3://training"):
        read_tensors(FOLDER, manifest)


@pytest.mark.usefixtures("gate")
def test_a_part_that_cannot_be_finished_is_not_uploaded_cut_off() -> None:
    unreadable = Slice.whole("w9", torch.empty(4, device="meta"))
    with pytest.raises(NotImplementedError):
        write_part(FOLDER, 1, 1, 1, [*(Slice.whole(name, w) for name, w in large(1).items()), unreadable])
    assert fsspec.filesystem("s3").find(FOLDER) == []


@pytest.mark.usefixtures("gate")
def test_a_bucket_that_is_not_there_is_not_made() -> None:
    assert newest_sound("s3://misspelt/checkpoints", verify) == (None, [])
    with pytest.raises(
        StorageFailed, match="cannot write s3://misspelt/checkpoints/step-000000001/part-00001"
    ) as caught:
        write_part("s3://misspelt/checkpoints", 1, 1, 1, cut(state(), 1)[0])
    assert "check the address" in caught.value.hint
    assert "misspelt" not in fsspec.filesystem("s3").ls("")


@pytest.mark.usefixtures("gate")
def test_a_box_is_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(256, 8192)
    halves = [[Slice.of_box("w", w[:, a:b], w.shape, ((0, 256), (a, b)))] for a, b in ((0, 4096), (4096, 8192))]
    records = [write_part(FOLDER, 1, k, 2, part) for k, part in enumerate(halves, start=1)]
    assert seal(FOLDER, 1, FACTS, records) == verify(FOLDER, 1)
    fetched: list[int] = []

    async def counted(self: s3fs.S3FileSystem, *asked: object, **more: object) -> bytes:
        data = await fetch(self, *asked, **more)
        fetched.append(len(data))
        return data

    fetch = s3fs.S3FileSystem._cat_file
    monkeypatch.setattr(s3fs.S3FileSystem, "_cat_file", counted)
    s3fs.S3FileSystem.clear_instance_cache()
    _, lazy = open_checkpoint(FOLDER, 1, check=False)
    fetched.clear()  # the manifest
    assert torch.equal(lazy.read_box("w", ((10, 12), (4000, 4200))), w[10:12, 4000:4200])
    rows = sum(fetched) - 2 * (1 << 16)  # beside the headers: all that lies between two short rows
    assert 0 < rows < 2 * 2 * 4096 * 4
    assert torch.equal(open_checkpoint(FOLDER, 1)[1].read_box("w", ((0, 256), (1, 8000))), w[:, 1:8000])


@pytest.mark.usefixtures("gate")
def test_a_file_of_weights() -> None:
    saved = {"w": torch.randn(64, 32), "n": torch.tensor(7)}
    fsspec.filesystem("s3").pipe_file("training/w.safetensors", safetensors.torch.save(saved))
    lazy = open_weights("s3://training/w.safetensors")
    assert torch.equal(lazy.read_box("w", ((3, 9), (4, 5))), saved["w"][3:9, 4:5])
    assert same_bits(read_source("s3://training/w.safetensors").tensors, saved)


def test_the_server_goes_before_a_box_is_read(gate: Gate) -> None:
    save(FOLDER, 1)
    _, lazy = open_checkpoint(FOLDER, 1, check=False)
    gate.shut()
    with pytest.raises(StorageFailed, match=r"cannot (list|read) s3://training"):
        lazy["float64"]
