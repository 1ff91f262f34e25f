"""A SOURCE of weights on the command line: read, and said on stderr which checkpoint it came to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from distbelief.checkpoint.sources import Source

FORMS = "run directory, checkpoint, folder of checkpoints (paths or URLs), or .safetensors file"


def read(where: str) -> Source:
    """The weights at `where`; what had to be skipped on the way is said, with the reason."""
    from distbelief.checkpoint.sources import read_source

    source = read_source(where)
    for fault in source.skipped:
        typer.echo(f"{typer.style('warning:', fg='yellow', bold=True)} a checkpoint was skipped: {fault}", err=True)
    if source.checkpoint:
        typer.echo(f"reading {source.checkpoint}", err=True)
    return source
