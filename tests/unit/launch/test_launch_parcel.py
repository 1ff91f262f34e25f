"""The private folders of agents: gone with them, or removed by the next agent of this user."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from distbelief.launch.parcel import private_folder

HOLD = (
    "from pathlib import Path\n"
    "from distbelief.launch.parcel import private_folder\n"
    "with private_folder() as folder:\n"
    "    Path(folder, 'code').mkdir()\n"
    "    Path(folder, 'code', 'job.py').write_text('x')\n"
    "    print(folder, flush=True)\n"
    "    input()\n"
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_the_folder_is_for_its_owner_and_goes_with_the_block(temporary: Path) -> None:
    with private_folder() as folder:
        assert Path(folder).parent == temporary
        assert Path(folder).stat().st_mode & 0o077 == 0
        (Path(folder) / "file").touch()
    assert list(temporary.iterdir()) == []


def test_the_next_agent_removes_what_a_killed_one_left_and_nothing_else(temporary: Path) -> None:
    for name in ("distbelief-agent-file", "distbelief-verify-x"):
        (temporary / name).touch()
    held = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert held.stdout is not None
    left = Path(held.stdout.readline().strip())
    with private_folder():
        assert left.exists(), "its agent lives"
    held.kill()
    held.communicate()
    assert left.exists()
    with private_folder() as folder:
        assert {path.name for path in temporary.iterdir()} == {
            "distbelief-agent-file", "distbelief-verify-x", Path(folder).name
        }  # fmt: skip


def test_where_there_are_no_locks_nothing_is_removed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary / "distbelief-agent-old").mkdir()

    def refuses(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    with private_folder() as folder:
        assert Path(folder).exists()
    assert [path.name for path in temporary.iterdir()] == ["distbelief-agent-old"]
