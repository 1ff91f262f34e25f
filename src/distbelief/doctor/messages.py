"""What doctors on several hosts say to each other. The one who listens leads; the others have come to it.

The first question, FactsAsked, is in the coordinator's language too: one command looks at a run as well as at hosts.
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
    """The leader's answer to FactsAsked: this is no run, but a place where doctors meet. Repeated while they wait."""

    number: int
    """Of the question; -1: nobody asked."""
    now: float
    """The leader's clock."""
    here: int
    """Hosts that have come."""
    expected: int


class Arrived(Struct, frozen=True, tag=True):
    """A host has looked at itself."""

    host: Host
    skew: Skew
    """How far its clock is ahead of the leader's."""
    door: str
    """Where others can measure the way to it: HOST:PORT."""
    token: bytes
    """Which opens the door."""


class Measure(Struct, frozen=True, tag=True):
    """Measure the way to another host and back."""

    to: str
    """Its name."""
    door: str
    token: bytes


class Admitted(Struct, frozen=True, tag=True):
    """You are called so here."""

    name: str


class Measured(Struct, frozen=True, tag=True):
    links: list[Link]


class Concluded(Struct, frozen=True, tag=True):
    report: Report


class Dissolved(Struct, frozen=True, tag=True):
    """The leader goes without a report."""

    reason: str


ToLeader = FactsAsked | Arrived | Measured
FromLeader = RunFacts | Gathering | Admitted | Measure | Concluded | Dissolved

_to_leader = msgspec.msgpack.Decoder(ToLeader)
_from_leader = msgspec.msgpack.Decoder(FromLeader)
_encoder = msgspec.msgpack.Encoder()


def encode(message: ToLeader | FromLeader) -> bytes:
    return _encoder.encode(message)


def decode_to_leader(data: bytes) -> ToLeader:
    """Raises msgspec.MsgspecError for anything else."""
    message: ToLeader = _to_leader.decode(data)
    return message


def decode_from_leader(data: bytes) -> FromLeader:
    message: FromLeader = _from_leader.decode(data)
    return message
