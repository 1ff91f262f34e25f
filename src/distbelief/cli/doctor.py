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
            help="The address of a listening doctor, or a run (which is not disturbed).",
            show_default=False,
        ),
    ] = "",
    listen: Annotated[
        str,
        typer.Option(metavar="HOST[:PORT]", help="Listen here for the doctors of other hosts.", show_default=False),
    ] = "",
    hosts: Annotated[int, typer.Option(min=2, help="With --listen: the number of hosts, this one included.")] = 2,
    wait: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="With --listen: the longest wait for other hosts.")
    ] = 120,
    key: KeyFile = None,
    run_dir: Annotated[Path, typer.Option(metavar="DIR", help="The folder for run directories.")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object on stdout.")] = False,
) -> None:
    """Check this machine for problems: versions, processor, memory, disk, network, GPUs, leftover processes.

    With --listen on one host and --join on the others, also compare the hosts: versions, clocks, and the measured link
    between every pair. With --join and a run's address, check whether this host could take part in the run.

    The exit status is 0 without problems, 1 with problems.
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
        with LeaderSocket(endpoint(listen), with_key(read_key(key))) as leader_socket:
            how = f"distbelief doctor --join {leader_socket.address.removeprefix('tcp://')} --key FILE"
            say(f"waiting for {hosts - 1} more: {how}")
            report = Leader(leader_socket, host_name(), hosts, wait, say).hold(here)
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
