"""Where weights come from, and what is said when they cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distbelief.checkpoint.sources import RecordedJob, read_source, recorded_job
from distbelief.checkpoint.weights import save_tensors
from distbelief.errors import DistBeliefError


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
    with pytest.raises(DistBeliefError, match="is not a run directory"):
        read_source(tmp_path)
    with pytest.raises(DistBeliefError, match="there is no"):
        read_source(tmp_path / "missing")
    (tmp_path / "model.bin").touch()
    with pytest.raises(DistBeliefError, match="neither a run directory nor"):
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
