"""`distbelief coordinator JOB --listen ADDRESS`: lead a run whose members are all on other hosts."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from distbelief.cli.failures import MACHINE_OUTPUT
from distbelief.cli.keys import KeyFile, key_file
from distbelief.cli.summary import print_json, print_summary
from distbelief.cli.train import STRATEGY_HELP, check_job_file, parse_settings
from distbelief.engines.saveplan import DEFAULT_EVERY
from distbelief.observe.view import open_view


def coordinator(
    ctx: typer.Context,
    job: Annotated[Path, typer.Argument(help="The job file: Python that defines `job`.", show_default=False)],
    workers: Annotated[int, typer.Option(min=1, help="Begin when so many workers have joined.")],
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Where other hosts reach it: an address or name of this machine, a network card, 0.0.0.0.",
        ),
    ] = "127.0.0.1",
    key: KeyFile = None,
    strategy: Annotated[str, typer.Option(help=STRATEGY_HELP)] = "allreduce",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Set a hyper-parameter of the job. May be repeated."),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the run is kept; a folder that all hosts share.", show_default=False),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each worker; part of the exact result.")] = 1,
    min_workers: Annotated[
        int, typer.Option(min=1, metavar="N", help="With fewer workers alive, wait for more instead of going on.")
    ] = 1,
    save_every: Annotated[
        str,
        typer.Option(metavar="500|10m|end|never", help="Steps or time between two checkpoints; the last state too."),
    ] = DEFAULT_EVERY,
    checkpoints: Annotated[
        str, typer.Option(metavar="URL", help="Where checkpoints go: a folder, s3://… Default: RUN/checkpoints.")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines even on a terminal.")] = False,
) -> None:
    """Lead a run whose workers are started by hand on other hosts: `distbelief worker --join ADDRESS` there."""
    ctx.meta[MACHINE_OUTPUT] = json
    check_job_file(job)
    values = parse_settings(settings or [])

    from distbelief.api import run_file
    from distbelief.comm.routes import endpoint

    stream = sys.stderr if json else sys.stdout
    view = open_view(stream, plain=plain)

    with contextlib.redirect_stdout(stream), contextlib.closing(view):
        result = run_file(
            job,
            values,
            workers=workers,
            strategy=strategy,
            run_dir=run_dir,
            shares=[],
            view=view,
            threads=threads,
            min_workers=min_workers,
            save_every=save_every,
            checkpoints=checkpoints,
            listen=endpoint(listen),
            key_file=key_file(key),
            local_workers=0,
            room=0,
            is_open=True,
        )
    if json:
        print_json(result)
    else:
        print_summary(result, stream, plain=plain)
