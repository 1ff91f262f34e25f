"""`distbelief replay RUN`: execute one step of a run again, in this process, and look into it.

The checks here need no torch. Then the command starts itself anew in the environment that workers have: the order of
sets, and numpy's threads, can change what a job computes, and are fixed when Python starts.
"""

from __future__ import annotations

import bdb
import contextlib
import json as json_text
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from distbelief.cli.failures import MACHINE_OUTPUT, UsageError
from distbelief.launch.processes import WORKER_ENVIRONMENT

_STEP_HELP = (
    "The step to replay, counted from 0. Default: the step at which the run failed; if the parameters were not finite "
    "by then, the step that made them so."
)
_SHARD_HELP = (
    "Show the loss and the gradients of this shard only. The whole step is still executed, and the verdict is about "
    "the whole step."
)
_DEBUG_HELP = (
    "Stop in the debugger (pdb) before the forward pass of the shard (--shard, else the shard that failed, else the "
    "first), with the variables model, batch, target, step, shard and indices."
)


def replay(
    ctx: typer.Context,
    run: Annotated[Path, typer.Argument(help="The run directory.", show_default=False)],
    step: Annotated[int | None, typer.Option(min=0, metavar="N", help=_STEP_HELP, show_default=False)] = None,
    shard: Annotated[int | None, typer.Option(min=0, metavar="V", help=_SHARD_HELP, show_default=False)] = None,
    debug: Annotated[bool, typer.Option("--debug", help=_DEBUG_HELP)] = False,
    device: Annotated[str, typer.Option(help="The device. Default: the run's; another device gives other bits.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object on stdout.")] = False,
) -> None:
    """Execute one step of a run again, in one process, from the nearest checkpoint, and show its numbers.

    Shows loss and samples per shard, gradients per layer, values that are not finite and their origin, and whether the
    step equals the original step bit for bit. The exit status is 1 if the step is known to differ, else 0.
    """
    ctx.meta[MACHINE_OUTPUT] = json
    if debug and json:
        raise UsageError("--debug and --json do not go together: the debugger needs the terminal")

    from distbelief.replaying.records import chosen_step, read_run  # after the checks, which need none of it

    chosen_step(read_run(run), step)
    _start_as_workers_do(run, step, shard, debug, device, json)

    from distbelief.replaying.replay import Asked
    from distbelief.replaying.replay import replay as execute
    from distbelief.replaying.report import WayShown, as_json, lines

    # With --json, only the object goes to stdout, even if the job prints.
    with (
        contextlib.redirect_stdout(sys.stderr if json else sys.stdout),
        contextlib.closing(WayShown(sys.stderr)) as way,
    ):
        try:
            found = execute(Asked(run, step, shard, debug, device), way)
        except bdb.BdbQuit:
            typer.echo("left the debugger; the step was not executed to its end")
            raise typer.Exit from None
    if json:
        typer.echo(json_text.dumps(as_json(found), allow_nan=False))
    else:
        typer.echo("\n".join(lines(found)))
    if not found.same:
        raise typer.Exit(1)


def _start_as_workers_do(run: Path, step: int | None, shard: int | None, debug: bool, device: str, json: bool) -> None:
    """Replaces this process, unless it has that environment already."""
    environment = {"PYTHONHASHSEED": "0", **os.environ, **WORKER_ENVIRONMENT}
    if environment == dict(os.environ):
        return
    options = [f"--{name}={value}" for name, value in (("step", step), ("shard", shard)) if value is not None]
    options += [f"--device={device}"] if device else []
    options += [f"--{name}" for name, wanted in (("debug", debug), ("json", json)) if wanted]
    command = [sys.executable, "-P", "-m", "distbelief.cli.main", "replay", *options, "--", str(run)]
    os.execve(sys.executable, command, environment)
