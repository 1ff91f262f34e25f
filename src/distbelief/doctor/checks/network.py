"""Checks the network: the cards and addresses by which other hosts reach this machine, and whether ports can be
opened."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distbelief.control.addresses import Machine, resolve, this_machine
from distbelief.doctor.rules.report import Finding, ok, problem, skipped

# --- cards and routes -------------------------------------------------------------------------------------------------


def probe_cards() -> Machine:
    return this_machine()


def judge_cards(found: Machine, needed: bool) -> Finding:
    """`needed`: whether other hosts will take part."""
    about = "network"
    known = [f"{card.name} {' '.join(card.usable)}" for card in found.cards if card.usable]
    if not known:
        if needed:
            return problem(about, "there is no card with an address but loopback", "bring one up: ip link, ip address")
        return skipped(about, "there is no card with an address but loopback: this machine can only train alone")
    way = f"the default route is from {' and '.join(found.outward)}" if found.outward else "there is no default route"
    return ok(about, f"{', '.join(known)}; {way}")


# --- ports ------------------------------------------------------------------------------------------------------------


_ANSWER_S = 3.0
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LEAST_PORTS = 1000


@dataclass(frozen=True)
class Ports:
    tried: dict[str, str]
    """Address -> the error; empty: the port works."""
    localhost: list[str]
    """The addresses of the name `localhost`."""
    free: int
    """The number of ports that the system assigns automatically."""


def probe_ports(addresses: Sequence[str]) -> Ports:
    try:
        first, last = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):
        first, last = 32768, 60999
    tried = {address: _try_port(address) for address in dict.fromkeys(["127.0.0.1", *addresses])}
    return Ports(tried, resolve("localhost"), last - first + 1)


def _try_port(address: str) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, 0), family=family) as listener:
            listener.settimeout(_ANSWER_S)
            with socket.create_connection(listener.getsockname()[:2], timeout=_ANSWER_S) as near:
                far, _ = listener.accept()
                with far:
                    far.settimeout(_ANSWER_S)
                    near.sendall(b"?")
                    return "" if far.recv(1) == b"?" else "the bytes sent did not arrive"
    except OSError as error:
        return error.strerror or str(error)


def judge_ports(found: Ports) -> Finding:
    about = "ports"
    wrong = [f"{address}: {error}" for address, error in found.tried.items() if error]
    if wrong:
        return problem(
            about,
            f"a port of this machine cannot be reached from itself: {'; '.join(wrong)}",
            "bring loopback up (ip link set lo up), and let the firewall pass what a machine sends to itself",
        )
    if not set(found.localhost) & {"127.0.0.1", "::1"}:
        return problem(
            about,
            f"localhost is {' and '.join(found.localhost) or 'not known'} here",
            "have 127.0.0.1 localhost in /etc/hosts",
        )
    text = f"can be opened and reached at {', '.join(found.tried)}; {found.free} ports for automatic use"
    if found.free < LEAST_PORTS:
        return problem(about, text, "widen net.ipv4.ip_local_port_range (sysctl)")
    return ok(about, text)
