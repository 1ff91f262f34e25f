"""Connection files, and addresses to listen on."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from distbelief import kv
from distbelief.errors import DistBeliefError, JobError
from distbelief.kv.service import Connection, read_connection_file, write_connection_file


def test_a_connection_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "kv.json"
    left = tmp_path / f".kv.json.{os.getpid()}.draft"
    left.write_text("left behind")
    left.chmod(0o666)
    content = Connection("tcp://127.0.0.1:1", "ab" * 16, "boot", "")
    write_connection_file(path, content)
    assert read_connection_file(path) == content
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["kv.json"]


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"address": 5}'])
def test_what_is_no_connection_file_is_said(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "kv.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DistBeliefError, match=r"kv\.json") as caught:
        kv.connect(path)
    assert "distbelief kv" in caught.value.hint


@pytest.mark.parametrize("listen", ["", ":5", "host:port", "[fd00::1", "0.0.0.0:5", "[::]:5", "*", "[fd00::1]x:5"])
def test_an_address_that_is_none(listen: str) -> None:
    with pytest.raises(JobError) as caught, kv.serve(listen=listen):
        pass
    assert caught.value.hint


@pytest.mark.parametrize(("rank", "workers"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_that_is_none(tmp_path: Path, rank: int, workers: int) -> None:
    with pytest.raises(DistBeliefError, match="there is no rank"):
        kv.connect(tmp_path / "kv.json", rank=rank, workers=workers)
