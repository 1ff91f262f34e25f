"""Reading a run directory that others write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from distbelief.control.addresses import host_name
from distbelief.launch.growing import GrowingFile, History, Logs, seems_gone


def write(run_dir: Path, *records: dict[str, Any]) -> None:
    with (run_dir / "journal.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


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
        file.write('ch"}\n')
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


def test_a_coordinator_that_is_there_or_gone(tmp_path: Path) -> None:
    assert seems_gone(tmp_path)
    command = [sys.executable, "-c", "input()", "distbelief.coordinator"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:

        def advertise(host: str, pid: int) -> None:
            (tmp_path / "coordinator.json").write_text(json.dumps({"host": host, "pid": pid}))

        advertise(host_name(), process.pid)
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes():  # empty for a moment of its start
            time.sleep(0.01)
        assert not seems_gone(tmp_path)
        advertise(host_name(), os.getpid())  # the number belongs to another process by now
        assert seems_gone(tmp_path)
        advertise("another host", os.getpid())
        assert not seems_gone(tmp_path)
        advertise(host_name(), process.pid)
        process.communicate(b"\n")
    assert seems_gone(tmp_path)
