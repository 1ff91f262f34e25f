"""`distbelief coordinator` and `distbelief worker`: a run whose hosts are started by hand."""

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


def worker(
    join: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS|RUN", help="Where the coordinator listens, or the run directory, if this host sees it."
        ),
    ],
    count: Annotated[int, typer.Option(min=1, metavar="N", help="Workers on this host.")] = 1,
    device: Annotated[
        str, typer.Option(help="The device of each worker. Default: the run's; exact runs take no other.")
    ] = "",
    key: KeyFile = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="The name of this machine in the run. Default: its host name.", show_default=False
        ),
    ] = "",
) -> None:
    """Add workers to a run, until it ends. After Ctrl-C or SIGTERM the workers hand over their work and leave.

    The run must have been started with --listen, or by `distbelief coordinator`. It may also be started later.
    """
    if Path(join).is_dir():
        from distbelief.launch.joining import join_run

        raise typer.Exit(join_run(Path(join), count, host, device))

    from distbelief.control.credentials import KeyAuthority
    from distbelief.control.keyfiles import required_key, run_secret
    from distbelief.control.unreachable import find
    from distbelief.launch.joining import PATIENCE_S, serve_host
    from distbelief.launch.launch import Invitation

    address = find(join, PATIENCE_S, print)
    access = KeyAuthority(run_secret(required_key(key, address)))

    def find_again() -> Invitation:
        return Invitation(find(join, 0.0, lambda text: None), access)

    raise typer.Exit(
        serve_host(Invitation(address, access), count, host, grows=True, device=device, find_again=find_again)
    )
