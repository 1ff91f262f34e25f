"""The values of placement: slices, the map of primaries and backups, the commands to servers, and a draft of a change.

The rules over these values are in placement.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

NONE: Final = -1
"""Stands for: no server."""


class Slice(Struct, frozen=True):
    number: int
    size_bytes: int


class Map(Struct, frozen=True):
    """The map that clients and servers receive. It names only servers that have all of the slice."""

    version: int
    primaries: tuple[int, ...]
    backups: tuple[int, ...]


class Promote(Struct, frozen=True, tag=True):
    """The server, which has all of the slice, becomes its primary. A live old primary hands over in order."""

    slice: int
    server: int


class CopyTo(Struct, frozen=True, tag=True):
    """The source, which is primary, sends the slice and every later change to the target.

    The source reports the copy as complete once the target has all of the slice; from then on the source acknowledges a
    push only when the target has it too.
    """

    slice: int
    source: int
    target: int


class Drop(Struct, frozen=True, tag=True):
    """The server deletes its copy of the slice, complete or not."""

    slice: int
    server: int


class Release(Struct, frozen=True, tag=True):
    """The leaving server holds nothing any more, and may exit."""

    server: int


Command = Promote | CopyTo | Drop | Release


class Placement(Struct, frozen=True):
    map: Map
    slices: tuple[Slice, ...]
    hosts: dict[int, str]
    """Live server -> its host."""
    recruits: tuple[int, ...]
    """By slice: the server that is receiving a copy, to become a holder."""
    handovers: tuple[bool, ...]
    """By slice: whether the recruit becomes primary once it has the copy; else it becomes backup."""
    leaving: tuple[int, ...] = ()
    named: tuple[int, ...] = ()
    """By slice: the version of the map that first named its last recruit."""


class Decision(Struct, frozen=True):
    """The consequences of an event: commands to servers, lost slices, and a reason for people."""

    commands: tuple[Command, ...]
    reason: str
    lost: tuple[int, ...] = ()


class Draft:
    """A mutable copy of a placement while one event is applied to it; `done` returns the new placement."""

    def __init__(self, placement: Placement) -> None:
        self.before = placement
        self.slices = placement.slices
        self.primaries = list(placement.map.primaries)
        self.backups = list(placement.map.backups)
        self.recruits = list(placement.recruits)
        self.handovers = list(placement.handovers)
        self.hosts = dict(placement.hosts)
        self.leaving = set(placement.leaving)
        self.commands: list[Command] = []

    @property
    def staying(self) -> list[int]:
        return sorted(self.hosts.keys() - self.leaving)

    def apart(self, one: int, other: int) -> bool:
        return self.hosts[one] != self.hosts[other]

    def wanted(self, number: int) -> tuple[int, int]:
        """The primary and the backup of a slice once its recruit, if any, has the copy."""
        primary, backup, recruit = self.primaries[number], self.backups[number], self.recruits[number]
        if recruit == NONE:
            return primary, backup
        if not self.handovers[number]:
            return primary, recruit
        # The old primary is the best backup, since it is complete and up to date, unless both are on one host.
        holders = [server for server in (primary, backup) if server != NONE]
        return recruit, min(holders, key=lambda holder: (holder in self.leaving, not self.apart(holder, recruit)))

    def swap(self, number: int) -> None:
        """Exchange the roles of primary and backup: no bytes move."""
        self.primaries[number], self.backups[number] = self.backups[number], self.primaries[number]
        self.commands.append(Promote(number, self.primaries[number]))

    def recruit(self, number: int, target: int, handover: bool = False) -> None:
        self.recruits[number], self.handovers[number] = target, handover
        self.commands.append(CopyTo(number, self.primaries[number], target))

    def dismiss(self, number: int) -> None:
        """Cancel the copy under way."""
        self.commands.append(Drop(number, self.recruits[number]))
        self.recruits[number], self.handovers[number] = NONE, False

    def done(self, reason: str, lost: Iterable[int] = ()) -> tuple[Placement, Decision]:
        version = self.before.map.version
        after = self.value(version)
        if after != self.before:
            after = self.value(version + 1)
        return after, Decision(tuple(self.commands), reason, tuple(lost))

    def value(self, version: int) -> Placement:
        return Placement(
            Map(version, tuple(self.primaries), tuple(self.backups)),
            self.slices,
            self.hosts,
            tuple(self.recruits),
            tuple(self.handovers),
            tuple(sorted(self.leaving)),
            self._named(version),
        )

    def _named(self, version: int) -> tuple[int, ...]:
        before = self.before.named or (0,) * len(self.slices)
        new = {command.slice for command in self.commands if isinstance(command, CopyTo)}
        return tuple(version if number in new else then for number, then in enumerate(before))
