"""Network cards and routes: what other hosts can reach this one at."""

from __future__ import annotations

from distbelief.control.addresses import Machine, this_machine
from distbelief.doctor.rules.finding import Finding, ok, problem, skipped


def probe() -> Machine:
    return this_machine()


def judge(found: Machine, needed: bool) -> Finding:
    """`needed`: whether other hosts are to come."""
    about = "network"
    known = [f"{card.name} {' '.join(card.usable)}" for card in found.cards if card.usable]
    if not known:
        if needed:
            return problem(about, "there is no card with an address but loopback", "bring one up: ip link, ip address")
        return skipped(about, "there is no card with an address but loopback: this machine works by itself")
    way = f"; the way out is from {' and '.join(found.outward)}" if found.outward else "; there is no default route"
    return ok(about, ", ".join(known) + way)
