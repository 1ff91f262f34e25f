"""What members owe is saved with the state, and comes back: to the same members as it was, to others in sum."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed import TCPStore

from distbelief.checkpoint.reading import read_manifest, read_tensors
from distbelief.checkpoint.saving import seal
from tests.support.replicas.owing import SAVED
from tests.support.stage import Stage

MEMBER = "tests.support.replicas.owing"
_names = itertools.count()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def play(stage: Stage, port: int, size: int, method: str, folder: Path, load: bool, where: str = "host") -> list[Any]:
    facts = {"port": port, "name": f"saved {next(_names)}", "size": size, "method": method, "where": where}
    members = [{**facts, "rank": rank, "folder": str(folder), "load": load} for rank in range(size)]
    found: list[Any] = stage.play(MEMBER, "train", members)
    return found


def sum_of(owed: list[bytes]) -> np.ndarray:
    return np.sum([np.frombuffer(one, np.float32).astype(np.float64) for one in owed], axis=0)


@pytest.mark.parametrize("method", ["int8", "topk=0.05", "powersgd=2"])
def test_a_run_goes_on_with_what_was_owed(stage: Stage, port: int, method: str, tmp_path: Path) -> None:
    smooth = play(stage, port, 2, method, tmp_path, load=False)
    assert len({one.sha256 for one in smooth}) == 1
    seal(str(tmp_path), SAVED, smooth[0].facts, [one.part for one in smooth])
    owed = [one.owed_saved for one in smooth]
    assert np.abs(sum_of(owed)).max() > 0

    same = play(stage, port, 2, method, tmp_path, load=True)
    assert [one.owed_first for one in same] == owed, "each has its own again"
    assert {one.sha256 for one in same} == {smooth[0].sha256}, "the same bits as without the interruption"

    for size in (1, 3):
        others = play(stage, port, size, method, tmp_path, load=True)
        np.testing.assert_allclose(sum_of([one.owed_first for one in others]), sum_of(owed), atol=1e-6)
        assert len({one.sha256 for one in others}) == 1


@pytest.mark.parametrize("method", ["int8", "topk=0.05", "powersgd=2"])
def test_members_on_devices_train_save_and_go_on_as_those_on_hosts(
    stage: Stage, port: int, method: str, tmp_path: Path
) -> None:
    """The host's memory stands in for a device's; so a checkpoint of one kind is one of the other."""
    host = play(stage, port, 2, method, tmp_path / "host", load=False)
    device = play(stage, port, 2, method, tmp_path, load=False, where="device")
    assert {one.sha256 for one in device} == {one.sha256 for one in host}
    assert [one.owed_saved for one in device] == [one.owed_saved for one in host]
    seal(str(tmp_path), SAVED, device[0].facts, [one.part for one in device])
    for where in ("host", "device"):
        again = play(stage, port, 2, method, tmp_path, load=True, where=where)
        assert [one.owed_first for one in again] == [one.owed_saved for one in device]
        assert {one.sha256 for one in again} == {device[0].sha256}


def test_names_in_the_checkpoint(stage: Stage, port: int, tmp_path: Path) -> None:
    found = play(stage, port, 2, "powersgd=2", tmp_path, load=False)
    seal(str(tmp_path), SAVED, found[0].facts, [one.part for one in found])
    tensors = read_tensors(str(tmp_path), read_manifest(str(tmp_path), SAVED))
    assert tensors["compression/residual/0/body.weight"].shape == tensors["model/body.weight"].shape
    assert not tensors["compression/residual/1/body.weight"].equal(tensors["compression/residual/0/body.weight"])
    assert tensors["compression/query/body.weight"].shape == (2, 14)
    assert "compression/residual/0/scale" not in tensors, "float64 is not compressed"
