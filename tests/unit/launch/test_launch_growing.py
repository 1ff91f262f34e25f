"""Reading a run directory that others write."""

from __future__ import annotations

import os
from pathlib import Path

from distbelief.coordinator.journal import Journal, replace_damaged
from distbelief.launch.growing import GrowingFile, History, Logs
from tests.support.coordinator.journals import write


def test_each_line_is_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    growing = GrowingFile(path)
    assert growing.lines() == [], "it is not there yet"
    path.write_bytes(b"one\ntw")
    assert growing.lines() == [b"one"]
    assert growing.lines() == []
    path.write_bytes(b"one\ntwo\n\nthree\n")
    assert growing.lines() == [b"two", b"", b"three"]


def test_lines_of_all_processes_but_not_of_some_logs(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    logs = Logs(tmp_path, without=("ray",))
    (folder / "worker-3.log").write_text("hello\n")
    (folder / "coordinator.log").write_bytes(b"\xff\n")
    (folder / "ray.log").write_text("pages\n")
    assert list(logs.lines()) == [("coordinator", "\N{REPLACEMENT CHARACTER}"), ("worker 3", "hello")]
    (folder / "worker-3.log").write_text("hello\nagain\n")
    assert list(logs.lines()) == [("worker 3", "again")]


def test_the_history_of_a_run_that_is_resumed(tmp_path: Path) -> None:
    history = History(tmp_path)
    assert not history.read()
    write(tmp_path, {"kind": "epoch", "at": 3.0}, {"kind": "generation", "at": 5.0, "generation": 1, "members": [0, 1]})
    assert history.read()
    assert (history.began_at, history.generation, history.workers, history.ended) == (3.0, 1, 2, None)
    assert not history.read()
    write(tmp_path, {"kind": "ended", "at": 9.0, "status": "stopped"})
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"kind":"epo')  # a line that is being written
    history.read()
    assert history.ended
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write("ch\n")  # its checksum is missing
    write(tmp_path, {"kind": "resumed", "at": 20.0})
    history.read()
    assert (history.began_at, history.ended) == (20.0, None)


def test_logs_from_now_on(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in ("worker-0", "command"):
        (logs / f"{name}.log").write_text("before\n")
    found = Logs(tmp_path, without=("command",), from_end=True)
    assert list(found.lines()) == []
    for name in ("worker-0", "worker-1", "command"):
        with (logs / f"{name}.log").open("a") as file:
            file.write("after\n")
    assert list(found.lines()) == [("worker 0", "after"), ("worker 1", "after")]


def test_a_log_that_was_cut_off_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "file"
    growing = GrowingFile(path)
    path.write_bytes(b"one\ntwo\n")
    assert growing.lines() == [b"one", b"two"]
    os.truncate(path, 4)
    assert growing.lines() == []
    path.write_bytes(b"one\nthree\n")
    assert growing.lines() == [b"three"]


def test_an_end_that_was_cut_off_again_is_no_end(tmp_path: Path) -> None:
    """A disk refused to make the record durable; the coordinator died, and the next one goes on with the run."""
    history, path = History(tmp_path), tmp_path / "journal.jsonl"
    with Journal.open(path) as journal:
        journal.append({"kind": "generation", "at": 5.0, "generation": 1, "members": [0, 1]})
        whole = path.stat().st_size
        journal.append({"kind": "ended", "at": 9.0, "status": "failed"})
        history.read()
        assert history.ended
    os.truncate(path, whole)
    with Journal.open(path) as journal:  # its first record is as long as the one that was cut off, or longer
        journal.append({"kind": "generation", "at": 6.0, "generation": 2, "members": [0, 1, 2]})
        assert history.read()
    assert (history.ended, history.generation, history.workers) == (None, 2, 3)


def test_a_journal_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    history, path = History(tmp_path), tmp_path / "journal.jsonl"
    write(tmp_path, {"kind": "generation", "at": 5.0, "generation": 1, "members": [0]}, {"kind": "lost"}, {"kind": "x"})
    write(tmp_path, {"kind": "ended", "at": 9.0, "status": "stopped"})
    history.read()
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"lost"', b'"list"'))
    replace_damaged(path)
    write(tmp_path, {"kind": "resumed", "at": 20.0}, {"kind": "scaled"})
    history.read()
    assert (history.began_at, history.generation, history.ended) == (20.0, 1, None)
