"""What --listen means: one numeric address that every other host can be told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from distbelief.control.addresses import (
    Card,
    Machine,
    cards,
    endpoint,
    interface_to,
    own_address,
    resolve,
    route_to,
    split,
)
from distbelief.errors import DistBeliefError, JobError

LO = Card("lo", ("127.0.0.1", "::1"))
ETH = Card("eth0", ("10.0.0.1", "fd00::1", "fe80::1%eth0"))
DOCKER = Card("docker0", ("172.17.0.1",))
NAMES = {"node1": ["10.0.0.1"], "debian": ["127.0.1.1"], "elsewhere": ["10.0.0.9"], "both": ["fd00::1", "10.0.0.1"]}


def machine(*there: Card, outward: Sequence[str] = ()) -> Machine:
    return Machine(there or (LO, DOCKER, ETH), outward, lambda name: NAMES.get(name, []))


@pytest.mark.parametrize(
    ("listen", "told"),
    [
        ("127.0.0.1", "tcp://127.0.0.1:*"),
        ("localhost:5000", "tcp://localhost:5000"),
        ("::1", "tcp://[::1]:*"),
        ("10.0.0.1", "tcp://10.0.0.1:*"),
        ("10.0.0.1:5000", "tcp://10.0.0.1:5000"),
        ("fd00::1", "tcp://[fd00::1]:*"),
        ("[fd00::1]:5000", "tcp://[fd00::1]:5000"),
        ("eth0", "tcp://10.0.0.1:*"),
        ("node1:5000", "tcp://10.0.0.1:5000"),
        ("both", "tcp://[fd00::1]:*"),
        ("0.0.0.0", "tcp://10.0.0.1:*"),
        ("*:5000", "tcp://10.0.0.1:5000"),
        ("[::]:5000", "tcp://[fd00::1]:5000"),
        ("debian", "tcp://10.0.0.1:*"),
    ],
)
def test_what_is_told(listen: str, told: str) -> None:
    assert endpoint(listen, machine()) == told


def test_everywhere_is_where_the_default_route_leaves() -> None:
    second = Card("eth1", ("10.1.0.1",))
    assert endpoint("0.0.0.0", machine(LO, ETH, second, outward=["10.1.0.1"])) == "tcp://10.1.0.1:*"
    assert endpoint("0.0.0.0", machine(LO, Card("eth0", ("fd00::1",)))) == "tcp://[fd00::1]:*"
    with pytest.raises(JobError, match="no address that other hosts reach") as caught:
        endpoint("0.0.0.0", machine(LO))
    assert "127.0.0.1" in caught.value.hint


@pytest.mark.parametrize(
    ("listen", "complaint"),
    [
        ("fe80::1%eth0", "link-local"),
        ("fe80::1", "link-local"),
        ("elsewhere", "10.0.0.9 is not an address of this machine"),
        ("10.0.0.9", "not an address of this machine"),
        ("nobody", "neither a name that can be resolved nor a network card"),
        ("lo", "no address that other hosts reach"),
    ],
)
def test_what_nobody_could_be_told_is_refused(listen: str, complaint: str) -> None:
    with pytest.raises(JobError, match=complaint) as caught:
        endpoint(listen, machine())
    assert caught.value.hint


@pytest.mark.parametrize(
    "text", ["", ":5", "host:port", "[fd00::1", "[fd00::1]x:5", "[10.0.0.1]:5", "host:", "host:0", "host:70000"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(JobError, match="is no address"):
        split(text)


def test_this_machine_reaches_itself_by_loopback() -> None:
    assert route_to("127.0.0.1").card == interface_to("tcp://127.0.0.1:5555") == "lo"
    assert own_address("tcp://127.0.0.1:5555") == "127.0.0.1"
    assert "127.0.0.1" in next(card for card in cards() if card.name == "lo").addresses
    with pytest.raises(DistBeliefError, match="no route"):
        interface_to("tcp://[fd00:dead:beef::1%nowhere]:5555")


def test_names() -> None:
    assert resolve("127.0.0.5") == ["127.0.0.5"]
    assert resolve("no-such-host.invalid") == []
