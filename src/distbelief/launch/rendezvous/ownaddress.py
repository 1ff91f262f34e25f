"""An address of this machine at which other hosts can reach it."""

from __future__ import annotations

from collections.abc import Iterable

from distbelief.control.addresses import cards, host_name, resolve, route_to
from distbelief.errors import DistBeliefError

_FAR_AWAY = ("198.51.100.1", "2001:db8::1")  # in no network: kept for documents


def address_for(peers: Iterable[str]) -> str:
    """The address from which packets go to one of the peers; where none is known by name, the one that our own name
    stands for, or from which packets go to the world, or the only one there is. Without a network, loopback."""
    mine = _own_addresses()
    if not mine:
        return "127.0.0.1"
    for peer in peers:
        for address in resolve(peer):
            if address not in mine and (source := _source_towards(address)) in mine:
                return source
    for address in resolve(host_name()):
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
    found = resolve(name)
    mine = _own_addresses()
    for address in found:
        if address in mine:
            return address
    raise DistBeliefError(
        f"this process is to be met at {name}, which is none of the addresses of this machine ({', '.join(mine)})",
        hint="is it on the right host? is the name in /etc/hosts one of a loopback address?",
    )


def _own_addresses() -> list[str]:
    """Those that others can reach, IPv4 first."""
    usable = [address for card in cards() for address in card.usable]
    return sorted(usable, key=lambda text: ":" in text)


def _source_towards(address: str) -> str:
    try:
        return route_to(address).source
    except OSError:
        return ""
