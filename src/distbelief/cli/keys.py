"""`distbelief keys`: key files, for runs with members on several machines. Also the option --key of other commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distbelief.control.keyfiles import new_key, read_key

KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key",
        metavar="FILE",
        envvar="DISTBELIEF_KEY_FILE",
        help="The run's key file (see `distbelief keys`), for members that join by address.",
        show_default=False,
    ),
]

keys = typer.Typer(no_args_is_help=True, help="Make and check key files, for runs on several machines.")


@keys.command()
def new(file: Annotated[Path, typer.Argument(help="The file to write; it must not exist.")]) -> None:
    """Write a new key, readable by you alone. Every user with the file can join runs that were started with it."""
    new_key(file)
    typer.echo(f"wrote {file}: start the run with --key {file}, and copy the file to the machines that are to join")


@keys.command()
def check(file: Annotated[Path, typer.Argument(help="The key file.")]) -> None:
    """Check whether a key file can be used."""
    read_key(file)
    typer.echo(f"{file} is a key, and readable by its owner alone")


def key_file(path: Path | None) -> str:
    """The absolute path of the key file. It is read now, so an unusable file is refused before anything starts."""
    if path is None:
        return ""
    read_key(path)
    return str(path.resolve())
