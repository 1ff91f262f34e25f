"""Runs that go on elsewhere: `distbelief attach RUN` shows one from its directory, `distbelief stop RUN` ends one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from distbelief.cli.failures import MACHINE_OUTPUT
from distbelief.cli.options import AsJson, Plain
from distbelief.cli.summary import print_json, print_summary
from distbelief.errors import DistBeliefError
from distbelief.observe.view import open_view

if TYPE_CHECKING:
    from distbelief.launch.growing import History

REFRESH_S = 0.2
_NO_READER = 128 + signal.SIGPIPE
SILENT_S = 5.0
"""After this time `stop` says why it still waits."""
_ROOM_BYTES = 1 << 20
_STOPS = "the run stops when"
GONE_S = 15.0
"""A coordinator that is restarted is back, and its run goes on, long before."""


def attach(
    ctx: typer.Context,
    run: Annotated[Path, typer.Argument(help="The run directory, as `train` printed it.", show_default=False)],
    json: AsJson = False,
    plain: Plain = False,
) -> None:
    """Show a run that goes on elsewhere: detached, in another terminal, in a notebook, under Slurm.

    At the end of the run it prints the result and exits with the run's status. Ctrl-C closes the view only.
    """
    ctx.meta[MACHINE_OUTPUT] = json
    from distbelief.launch.growing import History
    from distbelief.launch.rundir import outcome
    from distbelief.result import result_of

    if not any((run / name).exists() for name in ("launch.json", "journal.jsonl")):
        raise DistBeliefError(f"{run} is no run directory", hint="give the folder that `train` printed")
    stream = sys.stderr if json else sys.stdout
    history = History(run)
    history.read()
    if history.ended is None:
        try:
            _watch(run, history, stream, plain)
        except KeyboardInterrupt as error:
            typer.echo(f"the view is closed; the run goes on: distbelief attach {run}", err=True)
            raise typer.Exit(130) from error
    if history.ended is None:  # nobody reads the view any more
        raise typer.Exit(_NO_READER)
    record = outcome(history.ended, run)
    wall_s = float(record["at"]) - history.began_at if history.began_at is not None else 0.0
    result = dataclasses.replace(result_of(record, run, 0.0), wall_s=wall_s)
    if json:
        print_json(result)
    else:
        print_summary(result, stream, plain=plain)


def _watch(run: Path, history: History, stream: TextIO, plain: bool) -> None:
    from distbelief.launch.growing import Logs
    from distbelief.launch.rundir import COMMAND_LOG

    elapsed_s = max(0.0, time.time() - history.began_at) if history.began_at is not None else 0.0
    logs = Logs(run, without=(Path(COMMAND_LOG).stem,), from_end=True)
    with contextlib.closing(open_view(stream, plain=plain, elapsed_s=elapsed_s)) as view:

        def look() -> bool:
            if has_no_reader(stream):
                raise BrokenPipeError
            lines = list(logs.lines())
            for source, line in lines:
                view.log(source, line)
            view.refresh()
            return bool(lines)

        view.started(run, history.workers)
        with contextlib.suppress(BrokenPipeError):
            until_the_end(run, history, look)


def has_no_reader(stream: TextIO) -> bool:
    """Whether nobody can read what is written to the stream: the pipe's reader has gone, or the terminal."""
    poll = select.poll()
    poll.register(stream, 0)  # errors and hang-ups are always reported
    return bool(poll.poll(0))


def until_the_end(run: Path, history: History, look: Callable[[], bool] = lambda: False) -> None:
    """Wait until the run's end is in its journal. Raises if its processes are gone without an end. `look` is called
    several times a second, and returns whether the run has done anything meanwhile."""
    from distbelief.coordinator.client import died, seems_gone

    there_at, shown = time.monotonic(), (0, 0)
    while history.ended is None:
        time.sleep(REFRESH_S)
        news = history.read()
        before, shown = shown, _metrics_of(run)
        if look() or news or shown != before or not seems_gone(run):
            there_at = time.monotonic()
        elif time.monotonic() - there_at > GONE_S:
            raise died(run)


class Waiting:
    """Tells what a run that is to stop still waits for: its notices, and a disk without room, on which it can write
    none."""

    def __init__(self, run: Path, say: Callable[[str], None]) -> None:
        from distbelief.coordinator.metricsfile import NAME, RECENT_BYTES, Tail

        self._run = run
        self._say = say
        self._notices = Tail(run / NAME, RECENT_BYTES)
        while self._notices.read():  # notices from before the request to stop
            pass
        self._since = time.monotonic()
        self._has_told = False

    def look(self) -> bool:
        while found := self._notices.read():
            for record in found:
                if record.get("kind") == "notice" and _STOPS not in str(record.get("text")):
                    self._say(str(record.get("text")))
        if not self._has_told and time.monotonic() - self._since > SILENT_S:
            self._has_told = True
            there = os.statvfs(self._run)
            is_full = there.f_bavail * there.f_frsize < _ROOM_BYTES
            cause = f": the disk of {self._run} has no room, free some space" if is_full else ""
            self._say(f"the run has not ended yet{cause}; Ctrl-C ends this command only")
        return False


def _metrics_of(run: Path) -> tuple[int, int]:
    """Changes with every line of the log of steps."""
    from distbelief.coordinator.metricsfile import NAME

    try:
        status = (run / NAME).stat()
    except OSError:
        return 0, 0
    return status.st_ino, status.st_size


def stop(
    run: Annotated[Path, typer.Argument(help="The run directory, as `train` printed it.", show_default=False)],
) -> None:
    """Save a checkpoint of a run and stop the run, as Ctrl-C at its command does. Returns when the run has ended."""
    from distbelief.control.messages import StopRequested
    from distbelief.coordinator.client import ask
    from distbelief.launch.growing import History
    from distbelief.launch.rundir import STOP_COMMAND

    history = History(run)
    history.read()
    was_over = history.ended is not None
    try:
        answer = ask(run, StopRequested(f"{STOP_COMMAND} received"))
    except DistBeliefError:
        history.read()
        if was_over or history.ended is None:
            raise
    else:
        if not answer.ok:
            raise DistBeliefError(answer.text)
        typer.echo(answer.text, err=True)
    until_the_end(run, history, Waiting(run, lambda text: typer.echo(text, err=True)).look)
    assert history.ended is not None
    typer.echo(f"the run has ended: {history.ended['reason']}")
