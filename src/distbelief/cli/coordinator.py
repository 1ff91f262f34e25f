"""`distbelief coordinator JOB --listen ADDRESS`: lead a run whose members are all on other hosts."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from distbelief.cli.failures import MACHINE_OUTPUT
from distbelief.cli.keys import KeyFile, key_file
from distbelief.cli.options import AsJson, JobFile, Listen, Plain, Settings, with_run_options
from distbelief.cli.profile import Profile, ProfileSteps, asked_steps, print_profile
from distbelief.cli.summary import print_json, print_summary
from distbelief.cli.train import check_job_file, parse_settings
from distbelief.observe.view import open_view
from distbelief.options import RunOptions


@with_run_options("strategy", "threads", "min_workers", "save_every", "checkpoints")
def coordinator(
    ctx: typer.Context,
    job: JobFile,
    workers: Annotated[int, typer.Option(min=1, help="Begin when this many workers have joined.")],
    listen: Listen = "127.0.0.1",
    key: KeyFile = None,
    settings: Settings = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The run directory; a folder that all hosts share.", show_default=False),
    ] = None,
    *,
    options: dict[str, Any],
    profile: Profile = False,
    profile_steps: ProfileSteps = "",
    json: AsJson = False,
    plain: Plain = False,
) -> None:
    """Lead a run whose workers users start by hand on other hosts: `distbelief worker --join ADDRESS` there."""
    ctx.meta[MACHINE_OUTPUT] = json
    check_job_file(job)
    values = parse_settings(settings or [])

    from distbelief.api import run_file
    from distbelief.control.addresses import endpoint
    from distbelief.launch.launch import Placement

    stream = sys.stderr if json else sys.stdout
    view = open_view(stream, plain=plain)

    with contextlib.redirect_stdout(stream), contextlib.closing(view):
        chosen = RunOptions(workers=workers, profile=asked_steps(profile, profile_steps), **options)
        placement = Placement(listen=endpoint(listen), key_file=key_file(key), local_workers=0, room=0, is_open=True)
        result = run_file(job, values, chosen, run_dir, view, placement=placement)
    if json:
        print_json(result)
    else:
        print_summary(result, stream, plain=plain)
    if result.profile:
        print_profile(result.profile["trace"], stream)
