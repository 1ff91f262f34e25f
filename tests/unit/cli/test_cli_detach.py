"""What the command says of a process that was to lead a run in the background, and did not."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from distbelief.cli import failures
from distbelief.cli.detach import Child, report_start
from distbelief.cli.failures import STARTED_BY
from distbelief.errors import DistBeliefError
from distbelief.launch.growing import History
from tests.support.coordinator.journals import write


def child(run_dir: Path, act: Callable[[int, int], object]) -> Child:
    """A process that calls `act` with its log and the pipe for its error, and ends."""
    log = os.open(run_dir / "log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    error_in, error_out = os.pipe()
    history = History(run_dir)
    pid = os.fork()
    if pid == 0:
        try:
            act(log, error_out)
        finally:
            os._exit(3)
    os.close(error_out)
    return Child(run_dir, pid, history, log, 0, error_in)


def raised(child: Child) -> DistBeliefError:
    with pytest.raises(DistBeliefError) as caught:
        report_start(child, json=False)
    return caught.value


def test_the_error_comes_through_the_pipe_because_the_disk_of_the_log_may_be_full(tmp_path: Path) -> None:
    error = DistBeliefError("cannot write launch.json: No space left on device", hint="free some", details="\0" * 9999)
    error.exit_code = 5
    there = raised(child(tmp_path, lambda log, pipe: failures._send(pipe, error)))
    assert (there.message, there.hint, there.exit_code) == (error.message, "free some", 5)
    assert there.details == "\0" * 3500


def test_the_error_is_sent_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    read, write_end = os.pipe()
    context = typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None)))
    context.meta[STARTED_BY] = write_end
    failures._report(context, DistBeliefError("no room"))
    assert failures.received_error(os.read(read, 9999)).message == "no room"
    assert "error: no room" in capsys.readouterr().err
    os.close(read)
    failures._report(context, DistBeliefError("nobody waits any more"))


def test_a_process_that_was_killed_is_told_of_with_the_signal(tmp_path: Path) -> None:
    there = raised(child(tmp_path, lambda log, pipe: os.kill(os.getpid(), signal.SIGKILL)))
    assert there.message == "the process that was to lead the run was killed by SIGKILL before the run began"
    assert (there.exit_code, there.details) == (137, "")
    assert "disk full" in there.hint


def test_a_process_that_ended_by_itself_is_told_of_with_its_output(tmp_path: Path) -> None:
    there = raised(child(tmp_path, lambda log, pipe: os.write(log, b"Traceback: something")))
    assert "ended with status 3" in there.message
    assert (there.exit_code, there.details) == (3, "Traceback: something")


def test_a_run_that_was_over_before_it_was_looked_at_has_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generation = {"kind": "generation", "generation": 1, "members": [0], "at": 1.0}
    there = child(tmp_path, lambda log, pipe: write(tmp_path, generation))
    assert report_start(there, json=True) == 0
    assert json.loads(capsys.readouterr().out) == {"run_dir": str(tmp_path), "pid": there.pid}
