"""Temporary folders: gone with their process, even if it is killed, and never before."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from distbelief.temporaryfolder import temporary_folder

HOLD = """
from distbelief.temporaryfolder import temporary_folder
with temporary_folder("test") as folder:
    (folder / "code").mkdir()
    (folder / "code" / "job.py").write_text("job = 1")
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of this process and of those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def holder() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_folder_is_its_owners_alone_and_gone_at_the_end(place: Path) -> None:
    with temporary_folder("test") as folder:
        assert folder.parent == place
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").write_text("content")
    assert not list(place.iterdir())


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one_and_that_of_a_living_one_is_not() -> None:
    living, used = holder()
    killed, left = holder()
    end(killed)
    assert left.exists()
    with temporary_folder("other"):
        assert left.exists(), "each kind looks after its own"
    with temporary_folder("test"):
        assert not left.exists()
        assert (used / "code" / "job.py").read_text() == "job = 1"
    end(living)


def test_nothing_else_is_removed(place: Path) -> None:
    (place / "elsewhere").mkdir()
    with temporary_folder("test") as folder:
        prefix = folder.name[: folder.name.rindex(".") + 1]
    (place / f"{prefix}link").symlink_to(place / "elsewhere")
    (place / f"{prefix}file").touch()
    (place / "distbelief.test.otherone.abc").mkdir()  # of another machine
    before = sorted(place.iterdir())
    with temporary_folder("test"):
        pass
    assert sorted(place.iterdir()) == before


def test_many_at_once_never_lose_theirs() -> None:
    """A folder is made and then locked: one that is removed in between is made again."""
    failed: list[Path] = []

    def make_some() -> None:
        for _ in range(100):
            with temporary_folder("test") as folder:
                (folder / "file").write_text("content")
                if os.listdir(folder) != ["file"]:
                    failed.append(folder)

    threads = [threading.Thread(target=make_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
