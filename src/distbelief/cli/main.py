"""The `distbelief` command. Each subcommand is one file, and imports heavy modules only when it runs."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Annotated, Any

import typer

from distbelief import __version__
from distbelief.cli.attach import attach, stop
from distbelief.cli.byhand import coordinator, worker
from distbelief.cli.chaos import chaos
from distbelief.cli.doctor import doctor
from distbelief.cli.failures import Commands
from distbelief.cli.keys import keys
from distbelief.cli.kv import kv
from distbelief.cli.new import new
from distbelief.cli.profile import profile
from distbelief.cli.replay import replay
from distbelief.cli.resume import resume
from distbelief.cli.running import checkpoint, scale
from distbelief.cli.slurm import slurm
from distbelief.cli.train import train
from distbelief.cli.verify import verify
from distbelief.cli.weights import average, export

app = typer.Typer(
    cls=Commands,
    name="distbelief",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(resume)
app.command()(attach)
app.command()(stop)
app.command()(checkpoint)
app.command()(scale)
app.command()(coordinator)
app.command()(worker)
app.command()(slurm)
app.command()(chaos)
app.command()(verify)
app.command()(replay)
app.command()(profile)
app.command()(export)
app.command()(average)
app.command()(kv)
app.add_typer(keys, name="keys")
app.command()(doctor)
app.command()(new)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"distbelief {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Distributed training whose results do not depend on the cluster."""


class _Output(io.FileIO):
    """The file of stdout or stderr. When its reader has gone (`| head`, a terminal that was closed), the output is
    dropped: what a command does, and its exit status, do not depend on who reads."""

    def write(self, data: Any) -> int:
        try:
            written: int = super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            return memoryview(data).nbytes
        return written


def _lenient(stream: Any) -> Any:
    """The same stream over `_Output`. A worker may print any character; a terminal that cannot show one must not end
    the run."""
    if stream is None:  # it was closed before the start, as by a shell's `>&-`
        return open(os.devnull, "w")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    file = io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(file, stream.encoding, errors="replace", line_buffering=stream.line_buffering)


def main() -> None:
    sys.stdout, sys.stderr = _lenient(sys.stdout), _lenient(sys.stderr)
    app(prog_name="distbelief")


if __name__ == "__main__":
    main()
