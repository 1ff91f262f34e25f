"""`distbelief kv`: a key-value service, until it is stopped."""

from __future__ import annotations

import json as jsonlib
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from distbelief.cli.failures import MACHINE_OUTPUT
from distbelief.errors import DistBeliefError
from distbelief.temporaryfolder import temporary_folder


def kv(
    ctx: typer.Context,
    servers: Annotated[int, typer.Option(min=1, help="The number of servers; with 1, its death loses all values.")] = 2,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST[:PORT]",
            help="An address of this machine, for clients on other hosts; they need the connection file.",
        ),
    ] = "127.0.0.1",
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Where the connection file and the logs go. Default: a new folder, removed at the end.",
            show_default=False,
        ),
    ] = None,
    no_shared_memory: Annotated[
        bool, typer.Option("--no-shared-memory", help="Send values over sockets, also on this machine.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the connection file as one JSON object.")] = False,
) -> None:
    """Serve a key-value store until Ctrl-C: init, push, pull, row_sparse_pull, set_optimizer, barrier from any process.

    It prints the path of its connection file. Clients: `from distbelief import kv; store = kv.connect(PATH)`.
    """
    ctx.meta[MACHINE_OUTPUT] = json
    from distbelief.kv.service import endpoint
    from distbelief.kv.supervisor import ServiceOptions, Supervisor
    from distbelief.launch.pollloop import Signals

    where = endpoint(listen)

    def ready(path: Path) -> None:
        if json:
            typer.echo(jsonlib.dumps({"file": str(path), "servers": servers}))
        else:
            typer.echo(f"{path}\n{servers} server{'s' * (servers > 1)}; kv.connect with this file; Ctrl-C ends it")

    with temporary_folder("kv") if folder is None else nullcontext(_private(folder)) as place:
        options = ServiceOptions(place.resolve(), servers, where, shares=not no_shared_memory)
        with Signals() as signals, Supervisor(options, lambda text: typer.echo(text, err=True)) as supervisor:
            supervisor.run(signals.wake_fd, ready)


def _private(folder: Path) -> Path:
    """Make the folder of the connection file private, because the file has the service's secret."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise DistBeliefError(
            f"cannot make the folder {folder}: {error.strerror}", hint="give another --dir"
        ) from error
    if (folder / "kv.json").exists():
        raise DistBeliefError(
            f"{folder} has a connection file: a service runs there, or was killed",
            hint=f"stop it, or remove {folder / 'kv.json'}, or give another --dir",
        )
    return folder
