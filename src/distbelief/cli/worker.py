"""`distbelief worker --join RUN`: one more worker for a run on this machine, started by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def worker(
    join: Annotated[Path, typer.Option(metavar="RUN", help="The run directory, as `train` printed it.")],
) -> None:
    """Join a run on this machine as one more worker. Ctrl-C or SIGTERM lets it hand its work over and leave."""
    from distbelief.engines.byhand import join_run

    raise typer.Exit(join_run(join))
