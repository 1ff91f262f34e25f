"""The words of placement: which server is primary and which is backup of a slice, and what servers are told to do.

Plain values. `placement.py` has what happens (servers come, die, leave, report a copy), `settling.py` what follows
from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

NONE: Final = -1
"""In place of a server: there is none."""


class Slice(Struct, frozen=True):
    number: int
    size_bytes: int


class Map(Struct, frozen=True):
    """What clients and servers know. Only servers that have all of the slice are in it."""

    version: int
    primaries: tuple[int, ...]
    backups: tuple[int, ...]


class Promote(Struct, frozen=True, tag=True):
    """The server, which has all of the slice, is its primary from now on. A primary that lives hands over in order."""

    slice: int
    server: int


class CopyTo(Struct, frozen=True, tag=True):
    """The source, which is primary, sends the slice and every change after to the target.

    It reports the copy once the target has all of it and it answers no push any more that the target does not have.
    """

    slice: int
    source: int
    target: int


class Drop(Struct, frozen=True, tag=True):
    """The server forgets the slice, or what it has of it."""

    slice: int
    server: int


class Release(Struct, frozen=True, tag=True):
    """The server that wished to leave holds nothing any more, and may go."""

    server: int


Command = Promote | CopyTo | Drop | Release


class Placement(Struct, frozen=True):
    map: Map
    slices: tuple[Slice, ...]
    hosts: dict[int, str]
    """The servers that live, and the host that each is on."""
    recruits: tuple[int, ...]
    """By slice: the server that is wanted as a holder, and has not all of the copy yet."""
    handovers: tuple[bool, ...]
    """By slice: whether the recruit is to be primary once it has the copy; else it will be backup."""
    leaving: tuple[int, ...] = ()
    named: tuple[int, ...] = ()
    """By slice: the version of the map in which its last recruit was named."""

    @property
    def settled(self) -> bool:
        """Whether no copy is under way."""
        return all(recruit == NONE for recruit in self.recruits)


class Decision(Struct, frozen=True):
    """What follows from an event: orders for servers, slices that nobody has any more, and a line for people."""

    commands: tuple[Command, ...]
    reason: str
    lost: tuple[int, ...] = ()


class Draft:
    """A placement while one event is worked into it; `done` makes it a value again."""

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
        # The old primary is the best backup: it ends where the new one begins. Unless that would put both on one host.
        holders = [server for server in (primary, backup) if server != NONE]
        return recruit, min(holders, key=lambda holder: (holder in self.leaving, not self.apart(holder, recruit)))

    def swap(self, number: int) -> None:
        """The backup becomes primary and the primary becomes backup: no bytes move."""
        self.primaries[number], self.backups[number] = self.backups[number], self.primaries[number]
        self.commands.append(Promote(number, self.primaries[number]))

    def recruit(self, number: int, target: int, handover: bool = False) -> None:
        self.recruits[number], self.handovers[number] = target, handover
        self.commands.append(CopyTo(number, self.primaries[number], target))

    def dismiss(self, number: int) -> None:
        """The copy under way is not wanted any more."""
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
