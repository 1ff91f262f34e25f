"""`distbelief resume RUN`: continue a run that was stopped, or that died, from its newest sound checkpoint."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from distbelief.cli.detach import Detach, check_detachable, go_on_detached
from distbelief.cli.engines import On, placed
from distbelief.cli.failures import MACHINE_OUTPUT
from distbelief.cli.keys import KeyFile, key_file
from distbelief.cli.options import AsJson, Plain
from distbelief.cli.summary import print_json, print_summary
from distbelief.launch.engines import LOCAL
from distbelief.launch.launchers.rules.place import LauncherRequest
from distbelief.observe.view import open_view


def resume(
    ctx: typer.Context,
    run: Annotated[
        str,
        typer.Argument(
            help="The run directory, as `train` printed it. If it is lost: the folder or URL of the run's checkpoints.",
            show_default=False,
        ),
    ],
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Worker processes. Default: as many as before.", show_default=False),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(help="Any strategy that `train` takes. Default: as before.", show_default=False),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The new run directory of a run that is resumed from its checkpoints. Default: runs/NAME-ID.",
            show_default=False,
        ),
    ] = None,
    on: On = LOCAL,
    listen: Annotated[
        str, typer.Option(metavar="HOST[:PORT]", help="Where other hosts can join. Default: as before.")
    ] = "",
    key: KeyFile = None,
    detach: Detach = False,
    json: AsJson = False,
    plain: Plain = False,
) -> None:
    """Continue a run that was stopped or that died. The result is that of an uninterrupted run."""
    ctx.meta[MACHINE_OUTPUT] = json
    from distbelief.api import resume_run, run_to_resume
    from distbelief.control.addresses import endpoint
    from distbelief.launch.adoption import names_checkpoints
    from distbelief.launch.launch import read_launch
    from distbelief.launch.rundir import is_complete

    if detach:
        check_detachable(on)
    key_path = key_file(key)
    adopts = names_checkpoints(run)
    folder = run_dir if adopts else Path(run)
    with placed(LauncherRequest(on, Path(run).name, workers, folder, key_file=key_path)) as engine:
        there = run_to_resume(run, engine.run_dir if engine and adopts else run_dir)
        read_launch(there)  # a damaged one is the only thing to tell
        stream = sys.stderr if json else sys.stdout
        if is_complete(there):
            print("the run is complete: nothing is started, this is its result", file=stream)
        elif detach:
            go_on_detached(ctx, there, resumed=True, json=json)
        view = open_view(stream, plain=plain)
        with contextlib.redirect_stdout(stream), contextlib.closing(view):  # as in `train`
            result = resume_run(
                there,
                workers=engine.workers if engine else workers,
                strategy=strategy,
                view=view,
                key_file=key_path,
                engine=engine,
                on=on,
                listen=endpoint(listen) if listen else "",
            )
        if json:
            print_json(result)
        else:
            print_summary(result, stream, plain=plain)
