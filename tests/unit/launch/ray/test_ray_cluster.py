"""Reaching a Ray cluster: what is said when it cannot be."""

from __future__ import annotations

import socket
import sys

import pytest

from distbelief.errors import DistBeliefError
from distbelief.launch import engines
from distbelief.launch.ray import cluster


@pytest.mark.parametrize(
    ("on", "address"),
    [
        ("ray", ""),
        ("ray://head.example:10001", "ray://head.example:10001"),
        ("ray:10.0.0.1:6379", "10.0.0.1:6379"),
        ("ray:[fd00::2]:6379", "[fd00::2]:6379"),
    ],
)
def test_addresses(on: str, address: str) -> None:
    assert cluster.address_of(on) == address
    engines.check(on)


@pytest.mark.parametrize("on", ["ray:", "ray://", "ray:host", "ray://host", "ray:host:port", "ray://a b:1", "rya", ""])
def test_what_is_no_address_is_refused_before_anything_is_started(on: str) -> None:
    with pytest.raises(DistBeliefError, match="--on"):
        engines.check(on)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DistBeliefError) as error, cluster.connected("ray", 1):
        pass
    assert "distbelief[ray]" in error.value.hint


def test_where_nobody_listens_it_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(DistBeliefError, match=f"no answer from 127.0.0.1:{port}"):
        cluster._reach(f"127.0.0.1:{port}")
