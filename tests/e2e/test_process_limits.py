"""Limits on processes in a real control group: a start fails and says why, and is tried again; nothing else ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.runs.cgroup import Group, limited
from tests.support.runs.command import JOBS, Run
from tests.support.runs.reference import undisturbed
from tests.support.runs.saved import notices
from tests.support.runs.watched import Wait, Watched

Start = Callable[..., Run]

MANY = 10_000


@pytest.fixture
def group() -> Iterator[Group]:
    with limited({"pids": MANY}) as made:
        yield made


def test_a_worker_that_cannot_be_forked_is_started_when_there_is_room(
    start: Start, tmp_path: Path, wait_until: Wait, group: Group
) -> None:
    job = [JOBS / "small.py", "--set", "hold_step=6"]
    run = Watched(lambda *arguments: start(*arguments, prefix=group.inside), tmp_path, wait_until, *job, "--workers", 3)
    run.after(6)
    members = run.members()
    assert len(members) == 3
    group.limit("pids", 1)
    run.kill([2])
    run.wait_until(lambda: any("the next one is started in 2 s" in text for text in notices(run.folder)))
    (said,) = [text for text in notices(run.folder) if text.startswith("worker 3 ")]
    assert f"pids.max of the control group {group.folder}: 1, in use" in said
    assert "it could not be started" in (run.folder / "logs" / "worker-3.log").read_text()
    group.limit("pids", MANY)
    run.wait_until(lambda: len(run.members()) == 3 and max(run.members()) > 3)
    assert run.result()["weights_sha256"] == undisturbed(*job)


def test_a_run_that_cannot_start_any_process_says_why(start: Start, group: Group) -> None:
    group.limit("pids", 1)
    outcome = start("train", JOBS / "small.py", "--workers", 2, prefix=group.inside).wait()
    assert outcome.status == 1, outcome
    assert "error: the process that starts workers could not be started: no more processes are" in outcome.stderr
    assert "pids.max" in outcome.stderr
    assert "Aborted" not in outcome.stdout + outcome.stderr


def test_a_zygote_that_is_killed_before_it_can_fork_is_an_error_and_no_abort(
    start: Start, tmp_path: Path, wait_until: Wait
) -> None:
    run = start("train", JOBS / "small.py", "--workers", 2, "--run-dir", "run")

    def zygote() -> list[psutil.Process]:
        try:
            children = psutil.Process(run.pid).children()
            return [child for child in children if "distbelief.launch.zygote" in child.cmdline()]
        except psutil.Error:
            return []

    wait_until(zygote)
    for process in zygote():
        process.kill()
    outcome = run.wait()
    assert outcome.status == 1, outcome
    assert "error: the process that starts workers" in outcome.stderr, outcome
    assert "Aborted" not in outcome.stdout + outcome.stderr


READERS = """
import os, signal, sys
import numpy as np
from distbelief.data.readers import Readers
from distbelief.data.sources import as_source
with Readers(as_source(list(range(100))), seed=0, processes=2) as readers:
    print(*readers.pids, flush=True)
    input()
    for pid in readers.pids:
        os.kill(pid, signal.SIGKILL)
    readers.request((0, 0), 0, np.array([5, 7]))
    try:
        readers.take((0, 0), timeout_s=1.0)
    except TimeoutError:
        print("waits", flush=True)
    input()
    print(readers.take((0, 0)).tolist(), len(set(readers.pids)), flush=True)
"""


def test_readers_that_cannot_be_forked_are_forked_when_there_is_room(group: Group) -> None:
    command = [*group.inside, sys.executable, "-c", READERS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert len(process.stdout.readline().split()) == 2
        group.limit("pids", 1)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "waits\n"
        group.limit("pids", MANY)
        rest, said = process.communicate("\n", timeout=300)
    assert rest == "[5, 7] 2\n", said
    assert (
        f"could not be started: no more processes are allowed here (pids.max of the control group {group.folder}"
        in said
    )
