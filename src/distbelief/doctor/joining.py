"""The doctor that comes to another host: to one that leads, or to the coordinator of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from distbelief.control.addresses import interface_to, own_address
from distbelief.doctor import messages as words
from distbelief.doctor.line import Line, way_in
from distbelief.doctor.links import Doorway, measure
from distbelief.doctor.rules import ofrun
from distbelief.doctor.rules.clock import Exchange, skew
from distbelief.doctor.rules.finding import Finding, Host, Report, duration, ok, problem
from distbelief.errors import DistBeliefError

SILENT_S = 90.0
"""More than a round of measuring takes."""

Say = Callable[[str], None]
Examine = Callable[[], Host]


def join(where: str, key: Path | None, examine: Examine, say: Say) -> Report:
    """Look at this host, and at what is between it and what is there. What cannot be reached is a finding, too."""
    host: Host | None = None
    try:
        endpoint, authority = way_in(where, key)
        with Line(endpoint, authority) as line:
            answer, exchanges = line.ask()
            host = examine()
            if isinstance(answer, words.Gathering):
                return _meet(line, exchanges, host, say)
    except DistBeliefError as error:
        return Report([host or examine()], [problem("connection", error.message, error.hint)])
    return Report([host], [connection(endpoint, exchanges), *ofrun.judge(answer, host, exchanges)])


def connection(endpoint: str, exchanges: Sequence[Exchange]) -> Finding:
    trip = duration(skew(exchanges).round_trip_s)
    return ok(
        "connection",
        f"{endpoint} answers and has the same key; the way is {interface_to(endpoint)}, {trip} there and back",
    )


def _meet(line: Line, exchanges: Sequence[Exchange], host: Host, say: Say) -> Report:
    name, said = host.name, ""
    with Doorway(own_address(line.endpoint)) as doorway:
        line.send(words.Arrived(host, skew(exchanges), doorway.door, doorway.token))
        while True:
            message = line.hear(SILENT_S)
            match message:
                case words.Gathering():
                    text = f"{message.here} of {message.expected} hosts are here"
                    if text != said:
                        say(text)
                    said = text
                case words.Admitted():
                    name = message.name
                case words.Measure():
                    say(f"measuring the way to {message.to}")
                    line.send(words.Measured(measure(name, message.to, message.door, message.token)))
                case words.Concluded():
                    return message.report
                case words.Dissolved():
                    raise DistBeliefError(message.reason, hint="start it there again, and then here")
                case _:
                    continue
