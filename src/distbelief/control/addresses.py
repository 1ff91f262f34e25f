"""Addresses: what `--listen` means on this machine, and by which of its network cards another host is reached.

Members are told one numeric address, at which every host of the run reaches this machine. So a host name, a card's name
and a wildcard are turned into such an address here; an address that no other host could use is refused.
"""

from __future__ import annotations

import ipaddress
import platform
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from distbelief.control.sockets import host_of
from distbelief.errors import DistBeliefError, JobError

_EVERYWHERE = {"0.0.0.0": 4, "::": 6, "*": 4}
_DISTANT = ("203.0.113.1", "2001:db8::1")  # documentation addresses: the default route leads there
_VIRTUAL = ("docker", "virbr", "br-", "veth", "cni", "flannel", "tailscale")
_EXAMPLE = "an address of this machine, its name, or a network card's, for example 10.0.0.1, 10.0.0.1:5000 or eth0"


@dataclass(frozen=True)
class Card:
    """A network card that is up."""

    name: str
    addresses: tuple[str, ...]

    @property
    def usable(self) -> list[str]:
        """The addresses that other hosts can use. IPv4 first, which gloo also accepts."""
        good = [one for one in self.addresses if not _is_confined(one)]
        return sorted(good, key=lambda one: ":" in one)


@dataclass(frozen=True)
class Route:
    """How packets leave this machine."""

    source: str
    """The address of this machine that the other side sees."""
    card: str


@dataclass(frozen=True)
class Machine:
    """The properties of this machine's network from which an address is chosen."""

    cards: Sequence[Card]
    outward: Sequence[str]
    """This machine's addresses on the default routes."""
    resolve: Callable[[str], list[str]]


def this_machine() -> Machine:
    outward = []
    for far in _DISTANT:
        try:
            outward.append(_source(far))
        except OSError:  # there is no default route
            continue
    return Machine(cards(), outward, resolve)


def endpoint(listen: str, machine: Machine | None = None) -> str:
    """The endpoint to bind, which members are told too, for the user's --listen.

    >>> here = Machine([Card("eth0", ("10.0.0.1", "fd00::1", "fe80::1%eth0"))], ["10.0.0.1"], lambda name: [])
    >>> [endpoint(text, here) for text in ("127.0.0.1", "eth0:5000", "0.0.0.0", "[::]:5000")]
    ['tcp://127.0.0.1:*', 'tcp://10.0.0.1:5000', 'tcp://10.0.0.1:*', 'tcp://[fd00::1]:5000']
    """
    host, port = split(listen)
    if host != "localhost" and not _is_loopback(host):
        host = _own(host, listen, machine or this_machine())
    return tcp(host, port)


def split(text: str) -> tuple[str, str]:
    """Host and port; the port is "" if the text has none.

    >>> split("10.0.0.1:5000"), split("fd00::1"), split("tcp://[fd00::1]:5000"), split("host1")
    (('10.0.0.1', '5000'), ('fd00::1', ''), ('fd00::1', '5000'), ('host1', ''))
    """
    rest = text.strip().removeprefix("tcp://")
    if rest.startswith("["):
        host, bracket, after = rest[1:].partition("]")
        colon, port = after[:1], after[1:]
        is_one = bool(bracket) and ":" in host and colon in ("", ":")
    elif rest.count(":") > 1:
        host, colon, port, is_one = rest, "", "", True
    else:
        host, colon, port = rest.partition(":")
        is_one = True
    is_number = port == "*" or (port.isascii() and port.isdigit() and 0 < int(port) < 65536)
    if not host or not is_one or (colon and not is_number):
        raise JobError(f"{text!r} is no address", hint=_EXAMPLE)
    return host, port


def tcp(host: str, port: str | int = "") -> str:
    """An endpoint; without a port, any free port.

    >>> tcp("10.0.0.1"), tcp("fd00::1", 5555)
    ('tcp://10.0.0.1:*', 'tcp://[fd00::1]:5555')
    """
    return f"tcp://{bracketed(host)}:{port or '*'}"


def bracketed(host: str) -> str:
    """
    >>> bracketed("fd00::1"), bracketed("10.0.0.1")
    ('[fd00::1]', '10.0.0.1')
    """
    return f"[{host}]" if ":" in host else host


def _own(host: str, listen: str, machine: Machine) -> str:
    """The address of this machine that the user means by `host`."""
    if "%" in host or _is_link_local(host):
        raise JobError(
            f"--listen {listen}: a link-local address means something else on every host, so other hosts cannot use it",
            hint=_choices(machine) or _EXAMPLE,
        )
    if host in _EVERYWHERE:
        return _outward(machine, _EVERYWHERE[host], listen)
    for card in machine.cards:
        if card.name == host:
            if not card.usable:
                raise JobError(f"--listen {listen}: {host} has no address that other hosts reach", hint=_EXAMPLE)
            return card.usable[0]
    found = [host] if _is_address(host) else machine.resolve(host)
    if not found:
        names = ", ".join(card.name for card in machine.cards)
        raise JobError(
            f"--listen {listen}: {host} is neither a name that can be resolved nor a network card ({names})",
            hint=_choices(machine) or _EXAMPLE,
        )
    mine = [one for card in machine.cards for one in card.usable]
    for one in found:
        if one in mine:
            return one
    if all(_is_loopback(one) for one in found):  # as Debian has it in /etc/hosts for a machine's own name
        return _outward(machine, 4, listen)
    raise JobError(
        f"--listen {listen}: {' and '.join(found)} is not an address of this machine",
        hint=_choices(machine) or _EXAMPLE,
    )


def _outward(machine: Machine, family: int, listen: str) -> str:
    """For "every address": this machine's address on the default route, or else the first that others may reach."""
    mine = [one for card in sorted(machine.cards, key=_is_virtual) for one in card.usable]
    for one in sorted([*machine.outward, *mine], key=lambda one: (6 if ":" in one else 4) != family):
        if one in mine:
            return one
    raise JobError(
        f"--listen {listen}: this machine has no address that other hosts reach",
        hint="without a network use 127.0.0.1, for workers of this machine",
    )


def _choices(machine: Machine) -> str:
    known = [f"{card.name} {' '.join(card.usable)}" for card in machine.cards if card.usable]
    return f"this machine has {', '.join(known)}" if known else ""


def host_name() -> str:
    """This machine's name."""
    return platform.node() or "localhost"


def cards() -> list[Card]:
    """The network cards that are up, and their addresses."""
    up = psutil.net_if_stats()
    return [
        Card(name, tuple(one.address for one in found if one.family in (socket.AF_INET, socket.AF_INET6)))
        for name, found in psutil.net_if_addrs().items()
        if name in up and up[name].isup
    ]


def resolve(name: str) -> list[str]:
    """The addresses of a host in the order to try them; empty if the name is unknown."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def route_to(host: str) -> Route:
    """Raises OSError if no route exists."""
    source = _source(host)
    for card in cards():
        if any(one.partition("%")[0] == source for one in card.addresses):
            return Route(source, card.name)
    raise OSError(f"no network card has the address {source}")


def _source(host: str) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: it only asks the kernel for the route
        return str(probe.getsockname()[0]).partition("%")[0]


def interface_to(address: str) -> str:
    """The name of the network card from which packets go to the coordinator."""
    return _route(address).card


def own_address(address: str) -> str:
    """The address of this machine from which it reaches the coordinator; other hosts reach this machine there too."""
    return _route(address).source


def _route(address: str) -> Route:
    try:
        return route_to(host_of(address))
    except OSError as error:
        raise DistBeliefError(
            f"there is no route from this machine to the coordinator at {address}: {error.strerror or error}",
            hint="check the network, and the --listen address that the run was started with",
        ) from error


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_loopback(text: str) -> bool:
    return _is_address(text) and ipaddress.ip_address(text).is_loopback


def _is_link_local(text: str) -> bool:
    return _is_address(text) and ipaddress.ip_address(text).is_link_local


def _is_confined(text: str) -> bool:
    """Whether the address means nothing on another host."""
    return _is_loopback(text) or _is_link_local(text.partition("%")[0])


def _is_virtual(card: Card) -> bool:
    return card.name.startswith(_VIRTUAL)
