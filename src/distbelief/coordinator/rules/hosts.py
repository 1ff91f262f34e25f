"""The hosts of a run: each has an agent that starts members, has room for some, and may be lost. Pure.

An agent tells all it knows once a second. What it tells is not on record; which host a member was asked of is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SILENT_S = 3.0
"""A host whose agent was not heard of for so long kills nobody for us."""
LOST_S = 10.0
"""After so long its members are given up: agents speak every second."""
ASK_AGAIN_S = 5.0
"""An agent that has not started a member after this long is asked again: the message may be lost."""
ANY = -1
"""As a room: no limit."""


@dataclass(frozen=True)
class Host:
    name: str
    heard_at: float
    room: int = ANY
    """The most workers that it takes."""
    server_room: int = ANY
    """The most parameter servers."""


@dataclass(frozen=True)
class Offer:
    """An agent of another host, which was given a name."""

    host: str
    grows: bool = False
    """What it has room for is to be added to the run, as soon as it is there."""
    added: int = 0
    """So much was."""


Hosts = Mapping[str, Host]


def place(numbers: Iterable[int], hosts: Hosts, held: Mapping[str, int], rooms: Mapping[str, int]) -> dict[int, str]:
    """Which host each of these is started on; those for whom there is no room are left out. `held`: members per host.

    Hosts that say how many they take come first, the emptiest of them; then those without a limit.

    >>> hosts = {name: Host(name, 0.0) for name in "abc"}
    >>> place(range(4), hosts, {"b": 1}, {"a": 1, "b": 3, "c": 0})
    {0: 'b', 1: 'a', 2: 'b'}
    >>> place(range(2), hosts, {}, {"a": ANY, "b": 1})
    {0: 'b', 1: 'a'}
    """
    counts = {name: held.get(name, 0) for name in hosts}
    placed: dict[int, str] = {}
    for number in numbers:
        free = [name for name in hosts if rooms.get(name, ANY) == ANY or counts[name] < rooms[name]]
        if not free:
            break
        chosen = min(free, key=lambda name: _rank(name, rooms.get(name, ANY), counts[name]))
        placed[number] = chosen
        counts[chosen] += 1
    return placed


def _rank(name: str, room: int, count: int) -> tuple[bool, int, str]:
    return room == ANY, count if room == ANY else count - room, name


def unique(wanted: str, taken: Iterable[str]) -> str:
    """A name that no other host has.

    >>> unique("node", ["node", "node-2"])
    'node-3'
    """
    names = set(taken)
    name, number = wanted, 2
    while name in names:
        name, number = f"{wanted}-{number}", number + 1
    return name


def is_silent(hosts: Hosts, name: str, now: float) -> bool:
    return name not in hosts or now - hosts[name].heard_at > SILENT_S


def lost(hosts: Hosts, now: float, awake_s: float) -> list[str]:
    """`awake_s`: since when we have listened without a pause."""
    return [name for name, host in hosts.items() if min(now - host.heard_at, awake_s) > LOST_S]
