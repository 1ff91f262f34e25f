"""What the driver of a run on Ray reads from the run directory, and what it keeps off the terminal."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from distbelief.launch.ray.coordinator import sees, shown
from distbelief.launch.ray.driver import Target, quiet
from tests.support.coordinator.journals import write


def test_how_many_workers_are_wanted_is_in_the_journal(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    target = Target(tmp_path, 4)
    assert target.read() == (4, False)
    write(tmp_path, {"kind": "epoch"}, {"kind": "scaled", "target": 6, "leaving": []})
    assert target.read() == (6, False)
    with journal.open("a") as file:
        file.write("torn {\n[1]\n")
    write(tmp_path, {"kind": "ended", "status": "stopped"})
    assert target.read() == (6, True)
    write(tmp_path, {"kind": "resumed"})
    assert target.read() == (6, False)


def test_only_who_sees_the_same_file_sees_the_run_directory(tmp_path: Path) -> None:
    with shown(tmp_path) as word:
        assert sees(tmp_path, word)
        assert not sees(tmp_path / "elsewhere", word)
        assert not sees(tmp_path, "of another run")
    assert not sees(tmp_path, word)
    assert list(tmp_path.iterdir()) == []


def test_what_ray_prints_from_its_thread_goes_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with quiet(tmp_path / "ray.log"):
        print("ours")
        thread = threading.Thread(target=print, args=["pages of state"], name="ray_listen_error_messages")
        thread.start()
        thread.join()
    assert sys.stdout is before
    assert capsys.readouterr().out == "ours\n"
    assert (tmp_path / "ray.log").read_text() == "pages of state\n"
