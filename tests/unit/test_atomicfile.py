"""A file is there whole, or it is as it was before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distbelief.atomicfile import drafted, replace_file, write_whole
from distbelief.errors import DistBeliefError


def names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


def test_a_file_that_was_there_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    assert write_whole(file, lambda draft: draft.write_text("new"), lambda draft: draft.read_text()) == "new"
    assert file.read_text() == "new"
    assert names(tmp_path) == ["file"]


def fail(draft: Path) -> None:
    draft.write_text("half")
    raise RuntimeError("the disk is on fire")


def refuse(draft: Path) -> None:
    raise DistBeliefError("it has other bytes when it is read back")


@pytest.mark.parametrize(
    ("write", "check", "said"),
    [(fail, Path.read_text, "cannot write .*file: the disk is on fire"), (Path.touch, refuse, "^it has other bytes")],
)
def test_a_failure_leaves_the_old_file_and_no_draft(tmp_path: Path, write: object, check: object, said: str) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(DistBeliefError, match=said):
        write_whole(file, write, check)  # type: ignore[arg-type]
    assert file.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_replace_file_makes_a_private_file_whatever_a_killed_process_has_left(tmp_path: Path) -> None:
    left = tmp_path / f".file.{os.getpid()}.draft"
    left.write_text("left behind")
    left.chmod(0o666)
    replace_file(tmp_path / "file", b"new", private=True)
    assert (tmp_path / "file").read_bytes() == b"new"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["file"]


def test_replace_file_that_fails_leaves_the_old_content_and_no_draft(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError):
        replace_file(tmp_path / "file", b"new")
    assert names(tmp_path) == ["file"]


def test_a_draft_is_removed_whatever_happens(tmp_path: Path) -> None:
    def interrupted() -> None:
        with drafted(tmp_path / "file") as draft:
            draft.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(tmp_path) == []


@pytest.mark.parametrize("place", ["nowhere/file", "/proc/file"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, place: str) -> None:
    with pytest.raises(DistBeliefError, match=r"cannot write .*file: No such file"):
        write_whole(tmp_path / place, Path.touch, Path.read_text)


def test_a_writer_that_makes_a_private_file_does_not_decide_who_may_read_it(tmp_path: Path) -> None:
    def write(draft: Path) -> None:
        other = tmp_path / "other"
        other.touch(0o600)
        other.rename(draft)

    usual = os.umask(0o022)
    try:
        write_whole(tmp_path / "file", write, Path.read_text)
    finally:
        os.umask(usual)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


def test_no_room_for_a_safetensors_file(tmp_path: Path) -> None:
    """A limit on the size of files refuses as a full disk does: in the middle of the writing."""
    code = """
import resource, sys
from pathlib import Path
import torch
from distbelief.checkpoint.weights import save_tensors
from distbelief.errors import DistBeliefError
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    save_tensors({"w": torch.zeros(5000)}, Path(sys.argv[1]))
except DistBeliefError as error:
    print(error.message)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "w.safetensors")], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.startswith(f"cannot write {tmp_path}/w.safetensors: "), done.stderr
    assert names(tmp_path) == []
