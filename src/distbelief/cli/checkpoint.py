"""`distbelief checkpoint RUN`: request a checkpoint of a run now, and wait until it is saved."""

from __future__ import annotations

import json as jsonlib
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from distbelief.cli.failures import MACHINE_OUTPUT
from distbelief.errors import DistBeliefError

_LOOK_EVERY_S = 0.2


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
    raise DistBeliefError(
        f"the checkpoint of step {step} is not complete after {timeout_s:.0f} s",
        hint=f"the notices in {run / 'metrics.jsonl'} give the reason; the checkpoint may still be completed",
    )
