"""Where weights come from, and what is said when they cannot be had."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn

from distbelief.checkpoint import reading
from distbelief.checkpoint.faults import CheckpointDamaged, CheckpointMissing, CheckpointUnusable, StorageFailed
from distbelief.checkpoint.lazy import LazyTensors
from distbelief.checkpoint.manifest import Facts
from distbelief.checkpoint.parts import Slice
from distbelief.checkpoint.saving import delete, seal, write_part
from distbelief.checkpoint.sources import RecordedJob, open_source, read_source, recorded_job
from distbelief.checkpoint.weights import named_tensors, persistent_tensors, save_tensors
from distbelief.errors import DistBeliefError
from tests.support.checkpoint.samples import same_bits, save


class Net(nn.Module):
    """Tied weights, a running mean, a counter, and a buffer of two names that `state_dict` leaves out."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.enter, self.leave = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.leave.weight = self.enter.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.norm.register_buffer("mask", self.mask, persistent=False)


def save_net(folder: str | Path, step: int, net: nn.Module, **job: Any) -> None:
    """As training saves: tied tensors once, optimizer's state beside them, buffers that are not persistent too."""
    tied = {"leave.weight": "enter.weight", "norm.mask": "mask"}
    tensors = {f"model/{name}": t for name, t in named_tensors(net).items() if name not in tied}
    tensors |= {f"optimizer/exp_avg/{name}": torch.full_like(p, 9.0) for name, p in net.named_parameters()}
    tensors |= {f"begun/{name}": torch.tensor(1, dtype=torch.uint8) for name, _ in net.named_parameters()}
    save(folder, step, tensors, facts=Facts(job={"tied": tied, "transient": ["mask"], **job}))


def flip_a_bit(folder: Path, step: int) -> Path:
    part = folder / f"step-{step:09d}" / "part-00002-of-00002.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    return part


@pytest.fixture
def store() -> Iterator[str]:
    """A folder of an object store: no disk, no rename, no folders."""
    yield "memory://bucket/runs/net/checkpoints"
    fsspec.filesystem("memory").store.clear()


def test_a_run_directory_and_its_file_hold_the_same(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(3.0), "small": torch.ones(2, dtype=torch.bfloat16), "n": torch.tensor(7)}
    save_tensors(tensors, tmp_path / "weights.safetensors")
    run, file = read_source(tmp_path), read_source(tmp_path / "weights.safetensors")
    assert run.run_dir == tmp_path
    assert file.run_dir is None
    for source in (run, file):
        assert source.tensors.keys() == tensors.keys()
        assert all(torch.equal(source.tensors[name], tensors[name]) for name in tensors)
        assert all(source.tensors[name].dtype == tensors[name].dtype for name in tensors)


def test_a_run_without_weights(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").touch()
    with pytest.raises(DistBeliefError, match="has no weights yet"):
        read_source(tmp_path)


def test_what_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(DistBeliefError, match="neither a run directory nor a folder of checkpoints"):
        read_source(tmp_path)
    with pytest.raises(DistBeliefError, match="there is no"):
        read_source(tmp_path / "missing")
    (tmp_path / "model.bin").touch()
    with pytest.raises(DistBeliefError, match=r"neither a folder nor a .safetensors file"):
        read_source(tmp_path / "model.bin")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    save_tensors({"w": torch.zeros(100)}, file)
    whole = file.read_bytes()
    for content in (b"", whole[:4], whole[:-1], b"\xff" * len(whole)):
        file.write_bytes(content)
        with pytest.raises(DistBeliefError, match=r"w.safetensors is damaged"):
            read_source(file)
    save_tensors({}, file)
    with pytest.raises(DistBeliefError, match="holds no tensors"):
        read_source(file)


def test_the_recorded_job(tmp_path: Path) -> None:
    with pytest.raises(DistBeliefError, match=r"cannot read .*job.json: No such file"):
        recorded_job(tmp_path)
    (tmp_path / "job.json").write_text('{"name": "x", "file": "/a/x.py", "settings": {"lr": "0.1"}, "threads": 1}')
    assert recorded_job(tmp_path) == RecordedJob("/a/x.py", {"lr": "0.1"})
    for damaged in ("", "{", '{"file": 3}'):
        (tmp_path / "job.json").write_text(damaged)
        with pytest.raises(DistBeliefError, match=r"job.json is damaged"):
            recorded_job(tmp_path)


def test_a_checkpoint_fits_load_state_dict(tmp_path: Path, store: str) -> None:
    net = Net()
    for folder in (tmp_path, store):
        save_net(folder, 120, net)
        for where in (f"{folder}/step-000000120", f"{folder}/step-000000120/"):
            source = read_source(where)
            assert same_bits(source.tensors, persistent_tensors(net))
            assert (source.run_dir, source.checkpoint, source.skipped) == (None, f"{folder}/step-000000120", ())
            other = Net(seed=5)
            other.load_state_dict(source.tensors)
            assert same_bits(named_tensors(other), named_tensors(net))


def test_a_folder_of_checkpoints_is_its_newest(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path, store):
        for step in (0, 90, 1000):
            save_net(folder, step, Net(step))
        source = read_source(folder)
        assert same_bits(source.tensors, persistent_tensors(Net(1000)))
        assert source.checkpoint == f"{folder}/step-000001000"
    (tmp_path / "step-000002000").mkdir()  # the rest of a save that was cut short
    monkeypatch.chdir(tmp_path)
    assert read_source(".").checkpoint == read_source(f"file://{tmp_path}").checkpoint == f"{tmp_path}/step-000001000"


def test_a_damaged_newest_is_skipped_and_named(tmp_path: Path) -> None:
    for step in (0, 10, 20, 30):
        save_net(tmp_path, step, Net(step))
    (tmp_path / "step-000000030" / "manifest.json").write_text("{}")
    part = flip_a_bit(tmp_path, 20)
    source = read_source(tmp_path)
    assert same_bits(source.tensors, persistent_tensors(Net(10)))
    assert len(source.skipped) == 2
    assert "step-000000030/manifest.json is torn" in source.skipped[0]
    assert source.skipped[1] == f"{part} is damaged: its checksum differs"
    with pytest.raises(CheckpointDamaged, match="its checksum differs"):  # asked for by name: nothing takes its place
        read_source(tmp_path / "step-000000020")

    flip_a_bit(tmp_path, 10)
    flip_a_bit(tmp_path, 0)
    with pytest.raises(DistBeliefError, match=r"no checkpoint in .* is sound: .*step-000000030") as caught:
        read_source(tmp_path)
    assert len(caught.value.details.splitlines()) == 4


def test_opened_the_same_is_there_but_not_read_yet(tmp_path: Path, store: str) -> None:
    net = Net()
    save_tensors(persistent_tensors(net), tmp_path / "w.safetensors")
    for step in (10, 20):
        save_net(tmp_path / "checkpoints", step, net)
        save_net(store, step, net)
    part = flip_a_bit(tmp_path / "checkpoints", 20)
    for where in (tmp_path / "w.safetensors", tmp_path / "checkpoints", store, f"{store}/step-000000010"):
        source = open_source(where)
        assert isinstance(source.tensors, LazyTensors)
        assert same_bits(dict(source.tensors.items()), persistent_tensors(net))
        rows = source.tensors.read_boxes({"enter.weight": ((2, 4), (1, 3)), "leave.weight": ((2, 4), (1, 3))})
        assert torch.equal(rows["enter.weight"], net.enter.weight[2:4, 1:3])
        assert torch.equal(rows["leave.weight"], rows["enter.weight"])
    assert open_source(tmp_path / "checkpoints").skipped == (f"{part} is damaged: its checksum differs",)
    with pytest.raises(CheckpointDamaged, match="its checksum differs"):
        open_source(tmp_path / "checkpoints" / "step-000000020")


def test_parts_without_weights_are_not_read(tmp_path: Path) -> None:
    slices = [Slice.whole("model/w", torch.ones(2))], [Slice.whole("optimizer/exp_avg/w", torch.ones(2))]
    records = [write_part(tmp_path, 1, k, 2, part) for k, part in enumerate(slices, start=1)]
    seal(tmp_path, 1, Facts(), records)
    (tmp_path / "step-000000001" / records[1].file).unlink()
    assert same_bits(read_source(tmp_path).tensors, {"w": torch.ones(2)})
    assert same_bits(dict(open_source(tmp_path).tensors), {"w": torch.ones(2)})


def test_a_checkpoint_that_vanishes_while_it_is_read(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that keeps one checkpoint seals another and removes the one that was listed as the newest."""
    save_net(store, 10, Net(10))
    listed = reading.list_checkpoints
    moves = iter([lambda: save_net(store, 20, Net(20)), lambda: delete(store, 10)])

    def list_and_then_move_on(folder: str) -> list[int]:
        found = listed(folder)
        for move in moves:
            move()
        return found

    monkeypatch.setattr(reading, "list_checkpoints", list_and_then_move_on)
    source = read_source(store)
    assert same_bits(source.tensors, persistent_tensors(Net(20)))
    assert "there is no checkpoint of step 10" in source.skipped[0]


def test_a_run_that_has_not_finished(tmp_path: Path, store: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "journal.jsonl").touch()
    save_net(run / "checkpoints", 10, Net(10))
    source = read_source(run)
    assert same_bits(source.tensors, persistent_tensors(Net(10)))
    assert (source.path, source.run_dir) == (run, run)

    (run / "launch.json").write_text(json.dumps({"strategy": "allreduce", "checkpoints": store}))
    with pytest.raises(DistBeliefError, match="has no weights yet") as caught:
        read_source(run)
    assert store in caught.value.hint
    save_net(store, 20, Net(20))
    assert same_bits(read_source(run).tensors, persistent_tensors(Net(20)))

    (run / "launch.json").write_text('{"checkpoints": ""}')
    flip_a_bit(run / "checkpoints", 10)
    with pytest.raises(DistBeliefError, match="has no weights yet") as caught:
        read_source(run)
    assert "its checksum differs" in caught.value.details
    (run / "launch.json").write_text("{")
    with pytest.raises(DistBeliefError, match=r"launch.json is damaged"):
        read_source(run)

    save_tensors({"w": torch.ones(1)}, run / "weights.safetensors")  # done: the checkpoints do not matter any more
    assert read_source(run).tensors.keys() == {"w"}


def test_a_file_in_an_object_store(store: str, tmp_path: Path) -> None:
    save_tensors({"w": torch.arange(3.0)}, tmp_path / "w.safetensors")
    url = f"{store}/w.safetensors"
    with pytest.raises(DistBeliefError, match=f"there is no {url}"):
        read_source(url)
    whole = (tmp_path / "w.safetensors").read_bytes()
    fsspec.filesystem("memory").pipe(url, whole)
    source = read_source(url)
    assert torch.equal(source.tensors["w"], torch.arange(3.0))
    assert (source.path, source.run_dir, source.checkpoint) == (url, None, "")
    fsspec.filesystem("memory").pipe(url, whole[:-1])
    with pytest.raises(DistBeliefError, match="is damaged"):
        read_source(url)


def test_what_is_no_checkpoint(tmp_path: Path, store: str) -> None:
    with pytest.raises(DistBeliefError, match=f"{store} is neither a run directory nor a folder of checkpoints"):
        read_source(store)
    with pytest.raises(CheckpointMissing, match="there is no checkpoint of step 7"):
        read_source(f"{store}/step-000000007")
    with pytest.raises(DistBeliefError, match="there is no"):
        read_source(tmp_path / "step-000000007")
    with pytest.raises(StorageFailed, match="cannot use nosuch://"):
        read_source("nosuch://bucket/checkpoints")


def test_a_checkpoint_without_a_model(tmp_path: Path) -> None:
    save(tmp_path, 1, {"w": torch.ones(2), "optimizer/exp_avg/w": torch.ones(2)})
    with pytest.raises(CheckpointUnusable, match="holds no weights"):
        read_source(tmp_path / "step-000000001")


@pytest.mark.parametrize(
    ("job", "text"),
    [
        ({"tied": {"leave.weight": "gone"}}, "tied to 'gone', which is not in it"),
        ({"tied": ["enter.weight"]}, "Expected `object`"),
        ({"transient": "mask"}, "Expected `array`"),
    ],
)
def test_names_that_cannot_be(tmp_path: Path, job: dict[str, Any], text: str) -> None:
    save_net(tmp_path, 1, Net(), **job)
    with pytest.raises(CheckpointDamaged, match=text):
        read_source(tmp_path / "step-000000001")
