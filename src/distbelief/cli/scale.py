"""`distbelief scale RUN N`: change the number of workers of a run, or of its parameter servers, while it trains."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from distbelief.cli.failures import MACHINE_OUTPUT, UsageError
from distbelief.errors import DistBeliefError


def scale(
    ctx: typer.Context,
    run: Annotated[Path, typer.Argument(help="The run directory, as `train` printed it.", show_default=False)],
    workers: Annotated[int | None, typer.Argument(min=1, help="The new number of workers.", show_default=False)] = None,
    servers: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="The new number of parameter servers; 1 has no backup.", show_default=False
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as one JSON object.")] = False,
) -> None:
    """Change the number of workers or parameter servers of a run while it trains. The result stays the same, bit for
    bit, in strategies that are exact."""
    ctx.meta[MACHINE_OUTPUT] = json
    from distbelief.control.messages import ScaleRequested, ServersRequested
    from distbelief.coordinator.client import ask

    if workers is None and servers is None:
        raise UsageError(
            "give a number of workers or servers", hint="distbelief scale RUN 4, or distbelief scale RUN --servers 3"
        )
    wishes: dict[str, ScaleRequested | ServersRequested] = {}
    if workers is not None:
        wishes["workers"] = ScaleRequested(workers)
    if servers is not None:
        wishes["servers"] = ServersRequested(servers)
    texts: list[str] = []
    for wish in wishes.values():
        answer = ask(run, wish)
        if not answer.ok:
            raise DistBeliefError("; ".join([*texts, answer.text]))
        texts.append(answer.text)
    numbers = {"workers": workers, "servers": servers}
    said = {**{name: numbers[name] for name in wishes}, "text": "; ".join(texts)}
    typer.echo(jsonlib.dumps(said) if json else said["text"])
