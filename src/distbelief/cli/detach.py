"""`--detach`: the command goes on in a session of its own, without a terminal, and its caller returns.

The caller waits until the run has started or has failed to start, and reports that.
"""

from __future__ import annotations

import json as jsonlib
import os
import select
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distbelief.cli.failures import STARTED_BY, UsageError, received_error
from distbelief.errors import DistBeliefError
from distbelief.launch.engines import LOCAL, is_ray

if TYPE_CHECKING:
    from distbelief.launch.growing import History

Detach = Annotated[
    bool,
    typer.Option(
        "--detach",
        help="Return once the run has started. It goes on without a terminal; `distbelief attach RUN` shows it.",
    ),
]

_LOOK_EVERY_S = 0.1


def check_detachable(on: str) -> None:
    """Raises if a launcher has started this process: it would end a detached process with the others."""
    if on != LOCAL and not is_ray(on):
        raise UsageError(
            f"--detach cannot be combined with --on {on}",
            hint="the launcher's command can go to the background; `distbelief attach RUN` shows any run",
        )


def go_on_detached(ctx: typer.Context, run_dir: Path, *, resumed: bool, json: bool) -> None:
    """Returns in a new process only, which leads the run: its output goes to a log in the run directory, and an error
    also to the calling process, because the disk of the log may be full. The calling process waits for the start, says
    how to reach the run, and exits."""
    from distbelief.launch.growing import History
    from distbelief.launch.rundir import COMMAND_LOG, begun, check_idle

    if resumed:
        check_idle(run_dir)
    else:
        with begun(run_dir):  # the new process leads the run; here is told why it cannot be begun
            pass
    history = History(run_dir)
    history.read()
    path = run_dir / "logs" / COMMAND_LOG
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (0 if resumed else os.O_TRUNC)
    try:
        path.parent.mkdir(exist_ok=True)
        log = os.open(path, flags, 0o644)
    except OSError as error:
        raise DistBeliefError(
            f"cannot write {path}: {error.strerror}", hint="free some space, or make the run directory writable"
        ) from error
    begin = os.fstat(log).st_size
    sys.stdout.flush()
    sys.stderr.flush()
    error_in, error_out = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(error_in)
        os.set_blocking(error_out, False)
        ctx.meta[STARTED_BY] = error_out
        _leave_the_terminal(log)
        return
    os.close(error_out)
    raise typer.Exit(report_start(Child(run_dir, pid, history, log, begin, error_in), json))


def _leave_the_terminal(log: int) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(old, new)
    os.close(nothing)
    os.close(log)


@dataclass(frozen=True)
class Child:
    """The process that is to lead the run."""

    run_dir: Path
    pid: int
    history: History
    log: int
    """A descriptor of its log."""
    begin: int
    """Where its part of the log begins."""
    error: int
    """A pipe on which it sends the error that ends it."""


def report_start(child: Child, json: bool) -> int:
    """Wait for the first generation, or for the end of the process. Returns the exit status. Raises the error that has
    ended the process before the run began."""
    before = child.history.generation
    name = shlex.quote(str(child.run_dir))
    how = f"its view: distbelief attach {name}\nto stop it: distbelief stop {name}"
    said = b""
    try:
        while child.history.generation == before:
            ended, status = os.waitpid(child.pid, os.WNOHANG)
            while select.select([child.error], [], [], 0 if ended else _LOOK_EVERY_S)[0]:
                if not (more := os.read(child.error, 1 << 16)):
                    time.sleep(0 if ended else _LOOK_EVERY_S)
                    break
                said += more
            child.history.read()
            if ended and child.history.generation == before:
                return _ended_early(child, os.waitstatus_to_exitcode(status), said)
    except KeyboardInterrupt:
        typer.echo(f"the run goes on without this command (process {child.pid})\n{how}", err=True)
        return 130
    if json:
        typer.echo(jsonlib.dumps({"run_dir": str(child.run_dir), "pid": child.pid}))
    else:
        typer.echo(f"the run has started, as process {child.pid}: {child.run_dir}\n{how}")
    return 0


def _ended_early(child: Child, status: int, said: bytes) -> int:
    if said:
        raise received_error(said)
    text = os.pread(child.log, os.fstat(child.log).st_size, child.begin).decode(errors="replace")
    if status == 0:  # there was nothing to do
        typer.echo(text, nl=False)
        return 0
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    error = DistBeliefError(
        f"the process that was to lead the run {how} before the run began",
        hint="its output is above" if text else "it has left no output: is the disk full, or the memory used up?",
        details=text,
    )
    error.exit_code = status if status > 0 else 128 - status
    raise error
