"""The environment of the process that workers are forked from, and the logs of a run's processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distbelief.launch.processes import LogPipe, zygote_environment


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
