"""Doctors on several hosts: one leads, the others join it; a doctor can also join the coordinator of a run.

The leader waits for the other hosts, asks every pair to measure the link between them, makes the report, and sends it
to every host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace as changed

from distbelief.control.addresses import interface_to, own_address
from distbelief.control.events import FactsAsked
from distbelief.doctor import messages
from distbelief.doctor.connection import Connection, LeaderSocket, way_in
from distbelief.doctor.links import MeasuringServer, measure
from distbelief.doctor.rules import clock, compare
from distbelief.doctor.rules import compare as ofrun
from distbelief.doctor.rules.clock import ClockSample, skew
from distbelief.doctor.rules.report import Finding, Host, Link, Report, duration, ok, problem
from distbelief.errors import DistBeliefError

REMIND_S = 2.0
ROUND_S = 60.0
"""A pair without a report after this time has failed."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class JoinedHost:
    """A host that has joined."""

    identity: bytes
    arrived: messages.Arrived

    @property
    def name(self) -> str:
        return self.arrived.host.name


@dataclass
class Leader:
    """Leads the doctors of several hosts."""

    socket: LeaderSocket
    name: str
    """This host's name."""
    expected: int
    """The number of hosts, with this one."""
    wait_s: float
    say: Say
    joined: dict[bytes, JoinedHost] = field(default_factory=dict)
    waiting: set[bytes] = field(default_factory=set)
    """Hosts that have asked to join and are examining themselves."""

    def hold(self, examine: Callable[[], Host]) -> Report:
        """Lead the doctors. Returns the report, which is sent to every host."""
        try:
            with ThreadPoolExecutor(1) as beside:  # the leader answers other hosts while it examines itself
                me = beside.submit(examine)
                self._gather(me)
            with MeasuringServer(own_address(self.socket.address)) as server:
                report = self._conclude(me.result(), self._measure(server))
            self._tell(messages.Concluded(report))
            return report
        except BaseException as error:
            self._tell(messages.Dissolved(f"{self.name} has given up: {str(error) or type(error).__name__}"))
            raise

    def _gather(self, me: Future[Host]) -> None:
        until, next_reminder = time.monotonic() + self.wait_s, 0.0
        while not me.done() or (len(self.joined) + 1 < self.expected and time.monotonic() < until):
            if time.monotonic() >= next_reminder:
                next_reminder = time.monotonic() + REMIND_S
                self._tell(self._gathering())
            for identity, message in self.socket.heard(0.2):
                self._hear(identity, message)

    def _hear(self, identity: bytes, message: messages.ToLeader) -> list[Link]:
        if isinstance(message, FactsAsked):
            self.waiting.add(identity)
            self.socket.send(identity, self._gathering(message.number))
        elif isinstance(message, messages.Arrived) and identity not in self.joined:
            name = _unlike(message.host.name, [self.name, *(other.name for other in self.joined.values())])
            message = changed(message, host=changed(message.host, name=name))
            self.joined[identity] = JoinedHost(identity, message)
            self.socket.send(identity, messages.Admitted(name))
            self.say(f"{name} is here ({len(self.joined) + 1} of {self.expected})")
        elif isinstance(message, messages.Measured):
            return message.links
        return []

    def _gathering(self, number: int = -1) -> messages.Gathering:
        return messages.Gathering(number, time.time(), len(self.joined) + 1, self.expected)

    def _tell(self, message: messages.FromLeader) -> None:
        for identity in {*self.joined, *self.waiting}:
            self.socket.send(identity, message)

    # --- measuring ---------------------------------------------------------------------------------------------------

    def _measure(self, mine: MeasuringServer) -> list[Link]:
        names = [self.name, *(other.name for other in self.joined.values())]
        addresses = [
            (mine.address, mine.token),
            *((one.arrived.address, one.arrived.token) for one in self.joined.values()),
        ]
        identities = [b"", *self.joined]
        found: list[Link] = []
        for number, pairs in enumerate(turns := compare.rounds(len(names)), 1):
            self.say(f"measuring, round {number} of {len(turns)}")
            awaited = {}
            to_measure = 0
            for a, b in pairs:
                if a == 0:
                    to_measure = b
                else:
                    awaited[identities[a]] = (names[a], names[b])
                    self.socket.send(identities[a], messages.Measure(names[b], *addresses[b]))
            if to_measure:
                found += measure(self.name, names[to_measure], *addresses[to_measure])
            found += self._collect(awaited)
        return found

    def _collect(self, awaited: dict[bytes, tuple[str, str]]) -> list[Link]:
        found: list[Link] = []
        until = time.monotonic() + ROUND_S
        while awaited and time.monotonic() < until:
            for identity, message in self.socket.heard(0.2):
                links = self._hear(identity, message)
                if links and identity in awaited:
                    del awaited[identity]
                    found += links
            self._tell(self._gathering())  # shows the other hosts that the leader is alive
        return found + [Link(a, b, error=f"{a} has not answered for {ROUND_S:.0f} s") for a, b in awaited.values()]

    def _conclude(self, me: Host, links: list[Link]) -> Report:
        joined = sorted(self.joined.values(), key=lambda other: other.name)
        hosts = [me, *(other.arrived.host for other in joined)]
        shared: list[Finding] = [self._attendance(len(hosts))]
        if joined:
            shared += compare.versions({host.name: host.facts for host in hosts})
            shared.append(clock.judge({other.name: other.arrived.skew for other in joined}, self.name))
            shared += compare.links(links)
        return Report(hosts, shared, sorted(links, key=lambda link: (link.source, link.target)))

    def _attendance(self, here: int) -> Finding:
        if here < self.expected:
            where = self.socket.address.removeprefix("tcp://")
            return problem(
                "hosts",
                f"{here} of {self.expected} came within {self.wait_s:.0f} s",
                f"run `distbelief doctor --join {where} --key FILE` on the others; it says why it cannot join",
            )
        return ok("hosts", f"all {here} are here")


def _unlike(name: str, others: list[str]) -> str:
    """A unique name: several machines, above all containers, may have the same name.

    >>> _unlike("node", ["node", "node-2"]), _unlike("b", ["a"])
    ('node-3', 'b')
    """
    number, chosen = 1, name
    while chosen in others:
        number += 1
        chosen = f"{name}-{number}"
    return chosen


# --- joining ----------------------------------------------------------------------------------------------------------


SILENT_S = 90.0
"""Longer than a round of measurements."""

Examine = Callable[[], Host]


def join(where: str, key: Path | None, examine: Examine, say: Say) -> Report:
    """Examine this host, and its link to the doctor or coordinator at `where`. An unreachable one is a finding too."""
    host: Host | None = None
    try:
        endpoint, access = way_in(where, key)
        with Connection(endpoint, access) as line:
            answer, samples = line.ask()
            host = examine()
            if isinstance(answer, messages.Gathering):
                return _meet(line, samples, host, say)
    except DistBeliefError as error:
        return Report([host or examine()], [problem("connection", error.message, error.hint)])
    return Report([host], [connection(endpoint, samples), *ofrun.compare_with_run(answer, host, samples)])


def connection(endpoint: str, samples: Sequence[ClockSample]) -> Finding:
    trip = duration(skew(samples).round_trip_s)
    return ok(
        "connection",
        f"{endpoint} answers and has the same key; the route is {interface_to(endpoint)}, {trip} there and back",
    )


def _meet(line: Connection, samples: Sequence[ClockSample], host: Host, say: Say) -> Report:
    name, said = host.name, ""
    with MeasuringServer(own_address(line.endpoint)) as server:
        line.send(messages.Arrived(host, skew(samples), server.address, server.token))
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
                    raise DistBeliefError(message.reason, hint="start the doctor there again, and then here")
                case _:
                    continue
