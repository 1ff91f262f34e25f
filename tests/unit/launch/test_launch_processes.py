"""The processes of a run: the environment of the zygote, and the output of each process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from distbelief.errors import DistBeliefError
from distbelief.launch import processes
from distbelief.launch.processes import CoordinatorProcess, LogPipe, NotStarted, zygote_environment


@pytest.mark.parametrize(
    ("strategy", "keeps"),
    [
        ("allreduce:gloo", True),
        ("ps:async", True),
        ("local_sgd:8", True),
        ("sandblaster", False),
        ("pipeline:2", False),
        ("dp2.fsdp2", False),
    ],
)
def test_the_strategy_says_whether_workers_keep_freed_memory(strategy: str, keeps: bool) -> None:
    assert ("GLIBC_TUNABLES" in zygote_environment(strategy, {})) == keeps


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (b"one\ntwo", ["one", "two"]),
        (
            b"a" * 300_000 + b"\nnext\n",
            ["a" * 1000 + " … a long line is cut; the whole is in logs/worker-0.log", "next"],
        ),
        (b"b" * 300_000, ["b" * 1000 + " … a long line is cut; the whole is in logs/worker-0.log"]),
    ],
)
def test_of_a_long_line_the_beginning_is_shown_and_the_log_has_the_whole(
    tmp_path: Path, printed: bytes, shown: list[str]
) -> None:
    lines: list[str] = []
    log = LogPipe("worker 0", tmp_path / "worker-0.log", lambda source, line: lines.append(line))
    writer = threading.Thread(target=_write, args=(log, printed))
    writer.start()
    while log.pump():
        pass
    writer.join()
    log.close()
    assert lines == shown
    assert (tmp_path / "worker-0.log").read_bytes() == printed


def test_a_progress_bar_of_one_endless_line_is_shown_again_and_again(tmp_path: Path) -> None:
    lines: list[str] = []
    log = LogPipe("worker 0", tmp_path / "worker-0.log", lambda source, line: lines.append(line))
    writer = threading.Thread(target=_write, args=(log, b"".join(b"%06d %%\r" % number for number in range(40_000))))
    writer.start()
    while log.pump():
        pass
    writer.join()
    log.close()
    assert len(lines) >= 2
    assert lines[-1].endswith("039999 %\r")


def test_a_coordinator_that_dies_before_it_has_read_its_order_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes.sys, "executable", "/bin/true")
    log = LogPipe("coordinator", tmp_path / "coordinator.log", lambda source, line: None)
    process = CoordinatorProcess({"more than a pipe holds": "x" * (1 << 20)}, log)
    with pytest.raises(DistBeliefError, match="ended before it could serve"):
        process.address()
    process.close()
    log.close()
    assert process.ended()


def test_the_log_of_a_coordinator_that_was_not_started_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start may be tried hundreds of times: no descriptor may stay open."""
    monkeypatch.setattr(processes.sys, "executable", str(tmp_path / "nothing"))
    log = LogPipe("coordinator", tmp_path / "coordinator.log", lambda source, line: None)
    with pytest.raises(NotStarted, match="the coordinator could not be started: No such file"):
        CoordinatorProcess({}, log)
    assert not log.pump(), "its other end is closed"
    log.close()


def _write(log: LogPipe, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(log.write_fd, view) :]
    log.close_write()


def test_a_log_that_cannot_be_written_is_told_once_and_ends_nothing() -> None:
    shown: list[str] = []
    pipe = LogPipe("worker 3", Path("/dev/full"), lambda source, line: shown.append(f"{source}: {line}"))
    for line in (b"one\n", b"two\n"):
        os.write(pipe.write_fd, line)
        pipe.pump()
    pipe.close_write()
    pipe.close()
    assert shown == [
        "worker 3: its log /dev/full cannot be written: No space left on device",
        "worker 3: one",
        "worker 3: two",
    ]


def test_a_log_says_where_a_full_disk_has_cut_it(tmp_path: Path) -> None:
    """In a process of its own, whose files cannot grow for a while."""
    script = """
import os, resource, sys
from pathlib import Path
from distbelief.launch.processes import LogPipe
pipe = LogPipe("worker 3", Path(sys.argv[1]), lambda source, line: None)
before = resource.getrlimit(resource.RLIMIT_FSIZE)
def say(text, limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    os.write(pipe.write_fd, text)
    pipe.pump()
say(b"whole\\n", before[0]); say(b"lost\\n", 6); say(b"after\\n", before[0])
pipe.close_write()
pipe.close()
"""
    path = tmp_path / "worker-3.log"
    subprocess.run([sys.executable, "-c", script, str(path)], check=True, timeout=300)
    assert path.read_text() == "whole\n\n... 5 bytes are missing: the disk was full\nafter\n"
