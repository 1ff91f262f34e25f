"""`distbelief scale` and `distbelief checkpoint`: requests to a run while it trains."""

from __future__ import annotations

import json as jsonlib
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from distbelief.cli.failures import MACHINE_OUTPUT, UsageError
from distbelief.errors import DistBeliefError

_LOOK_EVERY_S = 0.2


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


def checkpoint(
    ctx: typer.Context,
    run: Annotated[Path, typer.Argument(help="The run directory, as `train` printed it.", show_default=False)],
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Wait no longer than this.")] = 600.0,
    json: Annotated[bool, typer.Option("--json", help="Print the checkpoint as one JSON object.")] = False,
) -> None:
    """Save a checkpoint of a run while it trains. Returns when the checkpoint is complete."""
    ctx.meta[MACHINE_OUTPUT] = json
    from distbelief.checkpoint.manifest import step_name
    from distbelief.control.messages import CheckpointRequested
    from distbelief.coordinator.client import ask
    from distbelief.coordinator.journal import read
    from distbelief.launch.launch import read_launch

    folder = read_launch(run).checkpoint_folder
    known = len(read(run / "journal.jsonl"))
    answer = ask(run, CheckpointRequested())
    if not answer.ok:
        raise DistBeliefError(answer.text)
    typer.echo(answer.text, err=True)
    found = _await(run, answer.step, known, timeout)
    path = f"{folder}/{step_name(found['step'])}"
    if json:
        typer.echo(jsonlib.dumps({"step": found["step"], "path": path, "size_bytes": found["size_bytes"]}))
    else:
        typer.echo(f"saved {path} ({found['size_bytes'] / 1e6:,.1f} MB)")


def _await(run: Path, step: int, known: int, timeout_s: float) -> dict[str, Any]:
    """Wait until the journal records the checkpoint. `known`: the number of records before the request."""
    from distbelief.coordinator.journal import read
    from distbelief.launch.rundir import ended

    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        over = ended(run)
        for record in read(run / "journal.jsonl")[known:]:
            if record.get("kind") == "checkpoint" and record["step"] >= step:
                return record
        if over:
            raise DistBeliefError(f"the run ended before the checkpoint was complete: {over['reason']}")
        time.sleep(_LOOK_EVERY_S)
    which = f"the checkpoint of step {step}" if step >= 0 else "the checkpoint"
    raise DistBeliefError(
        f"{which} is not complete after {timeout_s:.0f} s",
        hint=f"the notices in {run / 'metrics.jsonl'} give the reason; the checkpoint may still be completed",
    )
