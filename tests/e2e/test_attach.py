"""Terminals and pipes come and go: a run saves and stops with its terminal, or it goes on without one, and is shown
again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.command import JOBS, REPOSITORY, Outcome, Run
from tests.support.runs.reference import undisturbed
from tests.support.runs.watched import of_kinds, steps_of

Start = Callable[..., Run]
Cli = Callable[..., Outcome]
Wait = Callable[[Callable[[], object]], None]

JOB = [JOBS / "small.py", "--set", "brake_s=0.1", "--set", "steps=300"]  # slow while there is a file `brake`
ONE = [*JOB, "--workers", 1, "--run-dir", "run"]


@pytest.fixture
def brake(tmp_path: Path) -> Path:
    (tmp_path / "brake").touch()
    return tmp_path / "brake"


def on_a_terminal(tmp_path: Path, *environment: str) -> list[str]:
    """The prefix of a command that has a terminal until there is a file `gone`."""
    terminal = REPOSITORY / "tests" / "support" / "runs" / "terminal.py"
    return [sys.executable, str(terminal), str(tmp_path / "gone"), "env", *environment, "TERM=xterm"]


def end_of(tmp_path: Path) -> dict[str, Any]:
    return list(of_kinds(tmp_path / "run" / "journal.jsonl", "ended"))[-1]


def test_a_lost_terminal_saves_and_stops_the_run(
    start: Start, distbelief: Cli, tmp_path: Path, brake: Path, wait_until: Wait
) -> None:
    run = start("train", *ONE, prefix=on_a_terminal(tmp_path, "--default-signal=HUP"))
    wait_until(lambda: steps_of(tmp_path / "run") >= 3)
    (tmp_path / "gone").touch()
    assert run.wait().status == 128 + signal.SIGHUP
    assert end_of(tmp_path)["reason"].startswith("SIGHUP received; a checkpoint of step")
    brake.unlink()
    assert distbelief("resume", "run", "--json").json["weights_sha256"] == undisturbed(*JOB)


def test_a_terminal_that_is_lost_under_nohup_only_silences_the_view(
    start: Start, tmp_path: Path, brake: Path, wait_until: Wait
) -> None:
    run = start("train", *ONE, prefix=on_a_terminal(tmp_path, "--ignore-signal=HUP"))
    wait_until(lambda: steps_of(tmp_path / "run") >= 3)
    (tmp_path / "gone").touch()
    seen = steps_of(tmp_path / "run")
    wait_until(lambda: steps_of(tmp_path / "run") >= seen + 5)  # it draws meanwhile
    brake.unlink()
    outcome = run.wait()
    assert (outcome.status, "Traceback" in outcome.stdout) == (0, False), outcome
    assert end_of(tmp_path)["result"]["weights_sha256"] == undisturbed(*JOB)


def test_a_closed_pipe_only_silences_the_view(tmp_path: Path, brake: Path, wait_until: Wait) -> None:
    command = [sys.executable, "-m", "distbelief.cli.main", "train", *map(str, ONE)]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout
    assert run.stderr
    for _ in range(2):
        assert run.stdout.readline()
    run.stdout.close()  # as `head` does
    seen = steps_of(tmp_path / "run")
    wait_until(lambda: steps_of(tmp_path / "run") >= seen + 12)  # a line in two seconds; a step takes 0.4
    brake.unlink()
    assert (run.wait(), run.stderr.read()) == (0, b"")
    run.stderr.close()
    assert end_of(tmp_path)["result"]["weights_sha256"] == undisturbed(*JOB)


def test_a_detached_run_is_shown_stopped_and_resumed(
    start: Start, distbelief: Cli, tmp_path: Path, brake: Path, wait_until: Wait
) -> None:
    """Two views at once; one is closed by Ctrl-C, the other sees the end."""
    detached = start("train", *ONE, "--detach", "--json").wait().json
    assert os.getsid(detached["pid"]) == detached["pid"]
    assert (Path(f"/proc/{detached['pid']}/fd/0").readlink(), detached["run_dir"]) == (Path("/dev/null"), "run")
    views = [start("attach", "run", prefix=["env", "--default-signal=INT"]) for _ in range(2)]
    wait_until(lambda: all(view.has_printed() for view in views))
    views[0].signal(signal.SIGINT)
    left = views[0].wait()
    assert (left.status, "the run goes on" in left.stderr) == (130, True), left
    wait_until(lambda: steps_of(tmp_path / "run") >= 3)
    stopped = start("stop", "run").wait()
    assert (stopped.status, "a checkpoint of step" in stopped.stdout) == (0, True), stopped
    seen = views[1].wait()
    assert (seen.status, "stopped by distbelief stop; the newest" in seen.stderr) == (130, True), seen
    assert "step " in seen.stdout
    too_late = start("stop", "run").wait()
    assert (too_late.status, "is not running" in too_late.stderr) == (1, True)
    assert "step " in (tmp_path / "run" / "logs" / "command.log").read_text()

    again = start("resume", "run", "--detach").wait()
    assert (again.status, "distbelief attach run" in again.stdout) == (0, True), again
    view = start("attach", "run", "--json")
    wait_until(view.has_printed)
    brake.unlink()
    result = view.wait().json
    assert result["weights_sha256"] == undisturbed(*JOB)
    assert distbelief("attach", "run", "--json").json == result  # of an ended run


def test_a_run_that_cannot_start_says_so_and_not_that_it_has(start: Start, distbelief: Cli) -> None:
    broken = distbelief("train", JOBS / "broken.py", "--set", "fault=empty", "--run-dir", "run", "--detach")
    assert (broken.status, broken.stdout) == (2, "")
    assert "error: the data set is empty" in broken.stderr
    without_room = ["prlimit", "--fsize=0"]  # as a disk that takes no byte, also not of the log
    detach = ("--run-dir", "other", "--detach", "--json")
    failed = start("train", JOBS / "small.py", *detach, prefix=without_room).wait()
    assert (failed.status, "File too large" in json.loads(failed.stdout)["error"]) == (1, True)
    assert "File too large" in failed.stderr
    again = distbelief("train", JOBS / "small.py", "--workers", 1, "--run-dir", "run", "--json")
    assert again.json["steps"] == 12, "nothing has trained in it: the mended job is trained there"
