"""Messages between doctors on several hosts. The doctor that listens is the leader; the others have joined it.

The first message, FactsAsked, is also a message to coordinators, so the same command examines a run.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from distbelief.control.commands import RunFacts
from distbelief.control.events import FactsAsked
from distbelief.doctor.rules.clock import Skew
from distbelief.doctor.rules.report import Host, Link, Report

MOST_BYTES = 1 << 20


class Gathering(Struct, frozen=True, tag=True):
    """The leader's answer to FactsAsked: this is a doctor, not a run. Repeated while the others wait."""

    number: int
    """The question's number; -1: sent without a question."""
    now: float
    """The leader's clock."""
    here: int
    """Hosts that have joined."""
    expected: int


class Arrived(Struct, frozen=True, tag=True):
    """A host has examined itself."""

    host: Host
    skew: Skew
    """The lead of the host's clock over the leader's."""
    address: str
    """HOST:PORT at which other hosts measure the link to this host."""
    token: bytes
    """The token that a measuring host sends."""


class Measure(Struct, frozen=True, tag=True):
    """Measure the link to another host, in both directions."""

    to: str
    """The host's name."""
    address: str
    token: bytes


class Admitted(Struct, frozen=True, tag=True):
    """The leader has admitted the host under this name."""

    name: str


class Measured(Struct, frozen=True, tag=True):
    links: list[Link]


class Concluded(Struct, frozen=True, tag=True):
    report: Report


class Dissolved(Struct, frozen=True, tag=True):
    """The leader ends without a report."""

    reason: str


ToLeader = FactsAsked | Arrived | Measured
FromLeader = RunFacts | Gathering | Admitted | Measure | Concluded | Dissolved

_to_leader = msgspec.msgpack.Decoder(ToLeader)
_from_leader = msgspec.msgpack.Decoder(FromLeader)
_encoder = msgspec.msgpack.Encoder()


def encode(message: ToLeader | FromLeader) -> bytes:
    return _encoder.encode(message)


def decode_to_leader(data: bytes) -> ToLeader:
    """Raises msgspec.MsgspecError for any other message."""
    message: ToLeader = _to_leader.decode(data)
    return message


def decode_from_leader(data: bytes) -> FromLeader:
    message: FromLeader = _from_leader.decode(data)
    return message
