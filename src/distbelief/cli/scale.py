"""`distbelief scale RUN N`: change the number of workers of a run while it trains."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from distbelief.cli.failures import MACHINE_OUTPUT
from distbelief.errors import DistBeliefError


def scale(
    ctx: typer.Context,
    run: Annotated[Path, typer.Argument(help="The run directory, as `train` printed it.", show_default=False)],
    workers: Annotated[int, typer.Argument(min=1, help="How many workers there are to be.", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print the answer as one JSON object.")] = False,
) -> None:
    """Change the number of workers of a run while it trains. The result stays the same, bit for bit."""
    ctx.meta[MACHINE_OUTPUT] = json
    from distbelief.comm.messages import ScaleRequested
    from distbelief.coordinator.client import ask

    answer = ask(run, ScaleRequested(workers))
    if not answer.ok:
        raise DistBeliefError(answer.text)
    typer.echo(jsonlib.dumps({"workers": workers, "text": answer.text}) if json else answer.text)
