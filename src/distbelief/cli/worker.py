"""`distbelief worker --join ADDRESS|RUN`: more workers for a run, started by hand on any host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distbelief.cli.keys import KeyFile


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

    from distbelief.control.keyfiles import required_key, run_secret
    from distbelief.control.unreachable import find
    from distbelief.launch.joining import PATIENCE_S, serve_host
    from distbelief.launch.launch import Invitation

    address = find(join, PATIENCE_S, print)
    invitation = Invitation(address, run_secret(required_key(key, address)))

    def find_again() -> str:
        return find(join, 0.0, lambda text: None)

    raise typer.Exit(serve_host(invitation, count, host, grows=True, device=device, find_again=find_again))
