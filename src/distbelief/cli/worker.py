"""`distbelief worker --join RUN`: one more worker for a run, started by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def worker(
    join: Annotated[Path, typer.Option(metavar="RUN", help="The run directory, as `train` printed it.")],
    host: Annotated[
        str,
        typer.Option(metavar="NAME", help="What this machine is called. Default: its own name.", show_default=False),
    ] = "",
) -> None:
    """Join a run as one more worker. Ctrl-C or SIGTERM lets it hand its work over and leave.

    From another machine the run directory must be visible, and the run must have been started with --listen.
    """
    from distbelief.engines.byhand import join_run

    raise typer.Exit(join_run(join, host))
