"""`--detach`: the command goes on in a session of its own, without a terminal, and its caller returns.

The caller waits until the run has started or has failed to start, and reports that.
"""

from __future__ import annotations

import json as jsonlib
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distbelief.cli.failures import UsageError
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


def go_on_detached(run_dir: Path, *, resumed: bool, json: bool) -> None:
    """Returns in a new process only, which leads the run: its output goes to a log in the run directory. The calling
    process waits for the start, says how to reach the run, and exits."""
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
    pid = os.fork()
    if pid == 0:
        _leave_the_terminal(log)
        return
    raise typer.Exit(_report(run_dir, pid, history, log, begin, json))


def _leave_the_terminal(log: int) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(old, new)
    os.close(nothing)
    os.close(log)


def _report(run_dir: Path, pid: int, history: History, log: int, begin: int, json: bool) -> int:
    """Wait for the first generation, or for the end of the process. Returns the exit status."""
    before = history.generation
    name = shlex.quote(str(run_dir))
    how = f"its view: distbelief attach {name}\nto stop it: distbelief stop {name}"
    try:
        while history.generation == before:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                typer.echo(os.pread(log, os.fstat(log).st_size, begin), nl=False, err=status != 0)
                return os.waitstatus_to_exitcode(status)
            time.sleep(_LOOK_EVERY_S)
            history.read()
    except KeyboardInterrupt:
        typer.echo(f"the run goes on without this command (process {pid})\n{how}", err=True)
        return 130
    if json:
        typer.echo(jsonlib.dumps({"run_dir": str(run_dir), "pid": pid}))
    else:
        typer.echo(f"the run has started, as process {pid}: {run_dir}\n{how}")
    return 0
