"""`distbelief export` and `distbelief average`: trained weights for other programs, and the mean of several runs."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json as jsonlib
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distbelief.cli.failures import MACHINE_OUTPUT, UsageError

if TYPE_CHECKING:
    from distbelief.checkpoint.sources import Source

FORMS = "run directory, checkpoint, folder of checkpoints (paths or URLs), or .safetensors file"


class Form(enum.StrEnum):
    safetensors = "safetensors"
    program = "program"
    onnx = "onnx"


SUFFIXES = {".safetensors": Form.safetensors, ".pt2": Form.program, ".onnx": Form.onnx}


def export(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(help=f"A {FORMS}.", show_default=False)],
    to: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.", show_default=False)],
    form: Annotated[
        Form | None,
        typer.Option(
            "--format",
            help="Default: by FILE's suffix, which is .safetensors, .pt2 (torch.export program) or .onnx.",
            show_default=False,
        ),
    ] = None,
    model_of: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="If SOURCE is not a run: the run whose job makes the model."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")] = False,
) -> None:
    """Write the weights of a run or checkpoint for other programs: as safetensors, torch.export program or ONNX.

    A program and ONNX hold the model too. It is made again from the run's job file, and the file's output is compared
    with the model's before the file gets its name.
    """
    ctx.meta[MACHINE_OUTPUT] = json
    chosen = form or form_of(to)
    check_destination(to, force)

    from distbelief.exporting.export import export as write

    weights = read_weights(source)
    with contextlib.redirect_stdout(sys.stderr if json else sys.stdout):  # the job file may print
        exported = write(weights, to, chosen.value, model_of)
    if json:
        typer.echo(jsonlib.dumps({**dataclasses.asdict(exported), "checkpoint": weights.checkpoint or None}))
        return
    typer.echo(f"wrote {to}: {chosen}, {size(exported.size_bytes)}")
    typer.echo(f"holds {exported.tensors:,} tensors, {exported.parameters:,} numbers")
    if chosen is not Form.safetensors:
        typer.echo(f"takes {f'batches of {exported.batch} only' if exported.batch else 'batches of any size'}")
    typer.echo(f"checked: {exported.checked}")


def form_of(to: Path) -> Form:
    """
    >>> form_of(Path("net.onnx"))
    <Form.onnx: 'onnx'>
    """
    if to.suffix not in SUFFIXES:
        raise UsageError(
            f"--to {to}: the suffix does not say what to write",
            hint=f"use {', '.join(SUFFIXES)}, or add --format {'|'.join(Form)}",
        )
    return SUFFIXES[to.suffix]


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


# --- for both -----------------------------------------------------------------------------------------------------


def check_destination(to: Path, force: bool) -> None:
    """Raises a UsageError if the file can be known now to be unusable."""
    if to.is_dir():
        raise UsageError(f"--to {to} is a folder", hint=f"name a file in it: --to {to / 'model.safetensors'}")
    if to.exists() and not force:
        raise UsageError(f"{to} exists already", hint="give another --to, or --force to replace it")
    if not to.parent.is_dir():
        raise UsageError(f"--to {to}: there is no folder {to.parent}", hint=f"make it first: mkdir -p {to.parent}")


def size(size_bytes: int) -> str:
    """
    >>> size(812), size(31_100), size(2_500_000_000)
    ('812 B', '31.1 kB', '2.5 GB')
    """
    value, units = float(size_bytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def read_weights(where: str) -> Source:
    """The weights at `where`. Skipped checkpoints are reported with the reason."""
    from distbelief.checkpoint.sources import read_source

    source = read_source(where)
    for fault in source.skipped:
        typer.echo(f"{typer.style('warning:', fg='yellow', bold=True)} a checkpoint was skipped: {fault}", err=True)
    if source.checkpoint:
        typer.echo(f"reading {source.checkpoint}", err=True)
    return source
