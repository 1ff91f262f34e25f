"""`distbelief doctor`: finds problems of this machine, between several machines, or between this machine and a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distbelief.cli.failures import MACHINE_OUTPUT, UsageError
from distbelief.cli.keys import KeyFile
from distbelief.control.keyfiles import HOW_TO_MAKE_ONE, read_key


def doctor(
    ctx: typer.Context,
    join: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT|RUN",
            help="Where another doctor listens, or the coordinator of a run; the run is not disturbed.",
            show_default=False,
        ),
    ] = "",
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST[:PORT]", help="Wait here for the doctors of other hosts, and lead them.", show_default=False
        ),
    ] = "",
    hosts: Annotated[int, typer.Option(min=2, help="With --listen: how many hosts there are, with this one.")] = 2,
    wait: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="With --listen: the longest wait for other hosts.")
    ] = 120,
    key: KeyFile = None,
    run_dir: Annotated[Path, typer.Option(metavar="DIR", help="Where runs are to be kept.")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object on stdout.")] = False,
) -> None:
    """Look for what would go wrong: versions, processor, memory, disk, network, GPUs, leftovers.

    With --listen on one host and --join on the others, also what differs between them: versions, clocks, and the
    measured link between every pair. With --join and a run's address: whether this host could take part in the run.

    The exit status is 0 if all is well, 1 if there are problems.
    """
    ctx.meta[MACHINE_OUTPUT] = json
    if join and listen:
        raise UsageError("--join and --listen are for different hosts", hint="one host listens, the others join it")
    if listen and key is None:
        raise UsageError("--listen needs --key FILE", hint=HOW_TO_MAKE_ONE)
    import msgspec

    from distbelief.control.addresses import endpoint, host_name
    from distbelief.doctor.checks import examine
    from distbelief.doctor.connection import LeaderSocket, with_key
    from distbelief.doctor.hosts import Leader
    from distbelief.doctor.hosts import join as join_others
    from distbelief.doctor.rules.report import Host, Report, lines

    def say(text: str) -> None:
        typer.echo(typer.style(f"{text} …", dim=True), err=True)

    def here() -> Host:
        return examine(run_dir, bool(join or listen), say)

    if listen:
        assert key is not None
        with LeaderSocket(endpoint(listen), with_key(read_key(key))) as door:
            how = f"distbelief doctor --join {door.address.removeprefix('tcp://')} --key FILE"
            say(f"waiting for {hosts - 1} more: {how}")
            report = Leader(door, host_name(), hosts, wait, say).hold(here)
    elif join:
        report = join_others(join, key, here, say)
    else:
        report = Report([here()])
    if json:
        typer.echo(msgspec.json.encode(report).decode())
    else:
        for line in lines(report):
            typer.echo(_coloured(line))
    raise typer.Exit(1 if report.problems else 0)


def _coloured(line: str) -> str:
    return line.replace("PROBLEM", typer.style("PROBLEM", fg="red", bold=True), 1)
