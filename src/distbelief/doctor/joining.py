"""The doctor that joins another host: the leading doctor, or the coordinator of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from distbelief.control.addresses import interface_to, own_address
from distbelief.doctor import messages
from distbelief.doctor.connection import Connection, way_in
from distbelief.doctor.links import MeasuringServer, measure
from distbelief.doctor.rules import compare as ofrun
from distbelief.doctor.rules.clock import Exchange, skew
from distbelief.doctor.rules.report import Finding, Host, Report, duration, ok, problem
from distbelief.errors import DistBeliefError

SILENT_S = 90.0
"""Longer than a round of measurements."""

Say = Callable[[str], None]
Examine = Callable[[], Host]


def join(where: str, key: Path | None, examine: Examine, say: Say) -> Report:
    """Examine this host, and its link to the doctor or coordinator at `where`. An unreachable one is a finding too."""
    host: Host | None = None
    try:
        endpoint, authority = way_in(where, key)
        with Connection(endpoint, authority) as line:
            answer, exchanges = line.ask()
            host = examine()
            if isinstance(answer, messages.Gathering):
                return _meet(line, exchanges, host, say)
    except DistBeliefError as error:
        return Report([host or examine()], [problem("connection", error.message, error.hint)])
    return Report([host], [connection(endpoint, exchanges), *ofrun.compare_with_run(answer, host, exchanges)])


def connection(endpoint: str, exchanges: Sequence[Exchange]) -> Finding:
    trip = duration(skew(exchanges).round_trip_s)
    return ok(
        "connection",
        f"{endpoint} answers and has the same key; the route is {interface_to(endpoint)}, {trip} there and back",
    )


def _meet(line: Connection, exchanges: Sequence[Exchange], host: Host, say: Say) -> Report:
    name, said = host.name, ""
    with MeasuringServer(own_address(line.endpoint)) as server:
        line.send(messages.Arrived(host, skew(exchanges), server.address, server.token))
        while True:
            message = line.hear(SILENT_S)
            match message:
                case messages.Gathering():
                    text = f"{message.here} of {message.expected} hosts are here"
                    if text != said:
                        say(text)
                    said = text
                case messages.Admitted():
                    name = message.name
                case messages.Measure():
                    say(f"measuring the link to {message.to}")
                    line.send(messages.Measured(measure(name, message.to, message.address, message.token)))
                case messages.Concluded():
                    return message.report
                case messages.Dissolved():
                    raise DistBeliefError(message.reason, hint="start it there again, and then here")
                case _:
                    continue
