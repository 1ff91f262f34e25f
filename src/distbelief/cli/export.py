"""`distbelief export SOURCE --to FILE`: trained weights for other programs."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json as jsonlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from distbelief.cli.failures import MACHINE_OUTPUT, UsageError
from distbelief.cli.weightfiles import FORMS, check_destination, read_weights, size


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
