"""`distbelief stop RUN`: save a checkpoint of a run and end it, from any machine that sees its run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distbelief.errors import DistBeliefError


def stop(
    run: Annotated[Path, typer.Argument(help="The run directory, as `train` printed it.", show_default=False)],
) -> None:
    """Save a checkpoint of a run and stop the run, as Ctrl-C at its command does. Returns when the run has ended."""
    from distbelief.cli.attach import until_the_end
    from distbelief.control.messages import StopRequested
    from distbelief.coordinator.client import ask
    from distbelief.launch.growing import History
    from distbelief.launch.rundir import STOP_COMMAND

    history = History(run)
    answer = ask(run, StopRequested(f"{STOP_COMMAND} received"))
    if not answer.ok:
        raise DistBeliefError(answer.text)
    typer.echo(answer.text, err=True)
    until_the_end(run, history)
    assert history.ended is not None
    typer.echo(f"the run has ended: {history.ended['reason']}")
