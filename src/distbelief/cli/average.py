"""`distbelief average A B … --to FILE`: the weights of several runs as one model."""

from __future__ import annotations

import json as jsonlib
import math
from pathlib import Path
from typing import Annotated

import typer

from distbelief.cli.failures import MACHINE_OUTPUT, UsageError
from distbelief.cli.weightfiles import FORMS, check_destination, read_weights, size


def average(
    ctx: typer.Context,
    sources: Annotated[
        list[str],
        typer.Argument(help=f"Two or more, each a {FORMS}.", show_default=False),
    ],
    to: Annotated[Path, typer.Option(metavar="FILE", help="The .safetensors file to write.", show_default=False)],
    weights: Annotated[
        str,
        typer.Option(metavar="0.7,0.3", help="How much each source counts. Default: all the same.", show_default=False),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")] = False,
) -> None:
    """Merge the weights of several runs or checkpoints into one model: the mean of each number.

    The sources must hold the same names, shapes and types. Running statistics (BatchNorm) are averaged like weights;
    whole numbers and booleans must agree.
    """
    ctx.meta[MACHINE_OUTPUT] = json
    if len(sources) < 2:
        raise UsageError("average needs at least two sources", hint="distbelief average RUN1 RUN2 --to FILE")
    shares = parse_weights(weights, len(sources)) if weights else None
    if to.suffix != ".safetensors":
        raise UsageError(f"--to {to}: an average is a .safetensors file", hint=f"--to {to.with_suffix('.safetensors')}")
    check_destination(to, force)

    from distbelief.checkpoint.sources import average as mean
    from distbelief.checkpoint.weights import save_tensors

    found = [read_weights(source) for source in sources]
    tensors = mean(found, shares)
    save_tensors(tensors, to)
    size_bytes = to.stat().st_size
    if json:
        result = {
            "to": str(to),
            "sources": sources,
            "checkpoints": [one.checkpoint or None for one in found],
            "tensors": len(tensors),
            "size_bytes": size_bytes,
        }
        typer.echo(jsonlib.dumps(result))
        return
    typer.echo(f"wrote {to}: {size(size_bytes)}, {len(tensors):,} tensors, the mean of {len(sources)} sources")


def parse_weights(text: str, sources: int) -> list[float]:
    """
    >>> parse_weights("0.7,0.3", 2)
    [0.7, 0.3]
    """
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = []
    if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise UsageError(
            f"--weights {text!r} is not a list of numbers above 0", hint="one per source, for example --weights 0.7,0.3"
        )
    if len(weights) != sources:
        raise UsageError(f"--weights {text} gives {len(weights)} numbers for {sources} sources", hint="give one each")
    return weights
