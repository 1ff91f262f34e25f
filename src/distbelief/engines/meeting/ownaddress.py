"""An address of this machine at which other hosts can reach it."""

from __future__ import annotations

import ipaddress
import platform
import socket
from collections.abc import Iterable

import psutil

from distbelief.errors import DistBeliefError

_FAR_AWAY = ("198.51.100.1", "2001:db8::1")  # in no network: kept for documents


def address_for(peers: Iterable[str]) -> str:
    """The address from which packets go to one of the peers; where none is known by name, the one that our own name
    stands for, or from which packets go to the world, or the only one there is. Without a network, loopback."""
    mine = _own_addresses()
    if not mine:
        return "127.0.0.1"
    for peer in peers:
        for address in _resolved(peer):
            if address not in mine and (source := _source_towards(address)) in mine:
                return source
    for address in _resolved(platform.node()):
        if address in mine:
            return address
    usual = [source for far in _FAR_AWAY if (source := _source_towards(far)) in mine]
    if usual or len(mine) == 1:
        return (usual or mine)[0]
    raise DistBeliefError(
        f"this machine has several addresses, and it is not clear which one the other hosts reach: {', '.join(mine)}",
        hint="name it: --listen ADDRESS",
    )


def address_behind(name: str) -> str:
    """The address of this machine that such a name stands for."""
    if name in ("localhost", "127.0.0.1", "::1"):
        return name.replace("localhost", "127.0.0.1")
    found = _resolved(name)
    mine = _own_addresses()
    for address in found:
        if address in mine:
            return address
    raise DistBeliefError(
        f"this process is to be met at {name}, which is none of the addresses of this machine ({', '.join(mine)})",
        hint="is it on the right host? is the name in /etc/hosts one of a loopback address?",
    )


def as_address(host: str, port: int = 0) -> str:
    """
    >>> as_address("10.0.0.1"), as_address("fd00::1", 5555)
    ('tcp://10.0.0.1:*', 'tcp://[fd00::1]:5555')
    """
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}"


def _own_addresses() -> list[str]:
    """Those that others can reach, IPv4 first."""
    state = psutil.net_if_stats()
    there = [
        one.address
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family in (socket.AF_INET, socket.AF_INET6) and name in state and state[name].isup
    ]
    usable = [text for text in there if "%" not in text and not ipaddress.ip_address(text).is_loopback]
    return sorted(usable, key=lambda text: ":" in text)


def _resolved(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _source_towards(address: str) -> str:
    """Sends nothing: it only asks the kernel for the route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""
