"""Shared by the commands about weights: reading SOURCE, and checking FILE of `--to` before any work is done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from distbelief.cli.failures import UsageError

if TYPE_CHECKING:
    from distbelief.checkpoint.sources import Source


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


FORMS = "run directory, checkpoint, folder of checkpoints (paths or URLs), or .safetensors file"


def read_weights(where: str) -> Source:
    """The weights at `where`. Skipped checkpoints are reported with the reason."""
    from distbelief.checkpoint.sources import read_source

    source = read_source(where)
    for fault in source.skipped:
        typer.echo(f"{typer.style('warning:', fg='yellow', bold=True)} a checkpoint was skipped: {fault}", err=True)
    if source.checkpoint:
        typer.echo(f"reading {source.checkpoint}", err=True)
    return source
