"""Doctors that meet, over real sockets of this machine; what they find on it is given."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from distbelief.control import unreachable as reaching
from distbelief.doctor import connection, hosts, messages
from distbelief.doctor.connection import Connection, LeaderSocket, way_in, with_key
from distbelief.doctor.hosts import Leader, join
from distbelief.doctor.links import TOKEN_BYTES, MeasuringServer, measure
from distbelief.doctor.rules.clock import skew
from distbelief.doctor.rules.report import Host, Report

KEY = bytes(range(32))
AUTHORITY = with_key(KEY)
LISTEN = "tcp://127.0.0.2:*"  # counts as a network


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return write_key(tmp_path / "key", KEY)


def write_key(path: Path, content: bytes) -> Path:
    path.write_text(content.hex() + "\n")
    path.chmod(0o600)
    return path


def host(name: str, **facts: str) -> Callable[[], Host]:
    return lambda: Host(name, {"torch": "2", **facts}, [])


def silent(text: str) -> None: ...


@contextlib.contextmanager
def led(expected: int, wait_s: float = 60.0) -> Iterator[tuple[str, Callable[[], Report]]]:
    """A leader in a thread: its address, and what it concludes."""
    with ThreadPoolExecutor(1) as pool, LeaderSocket(LISTEN, AUTHORITY) as door:
        report = pool.submit(Leader(door, "first", expected, wait_s, silent).hold, host("first"))
        yield door.address.removeprefix("tcp://"), report.result


def test_three_hosts_find_each_other_and_are_told_the_same(key: Path) -> None:
    with led(3) as (address, result), ThreadPoolExecutor(2) as pool:
        others = [pool.submit(join, address, key, host("same", torch=torch), silent) for torch in ("2", "3")]
        report = result()
        assert [other.result() for other in others] == [report, report]
    assert [one.name for one in report.hosts] == ["first", "same", "same-2"]
    ways = {(link.source, link.target) for link in report.links}
    assert len(ways) == len(report.links) == 6
    assert all(link.bytes_per_s > 0 and link.latency_s > 0 for link in report.links)
    (odd,) = report.problems
    assert odd.about == "versions"
    assert "has 3, the others have 2" in odd.found


def test_who_does_not_come_is_not_waited_for_for_ever() -> None:
    with led(2, wait_s=0.3) as (_, result):
        (found,) = result().problems
    assert "1 of 2 came" in found.found
    assert "doctor --join 127.0.0.2:" in found.advice


def test_a_wrong_key_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ANSWER_S", 1.0)
    monkeypatch.setattr(reaching, "HANDSHAKE_S", 1.0)
    answered = threading.Event()

    def clock() -> float:
        """Jumps when the stranger has its answer: on a busy machine it needs longer than anybody wants to wait."""
        return time.monotonic() + (1000 if answered.is_set() else 0)

    monkeypatch.setattr(hosts, "time", SimpleNamespace(monotonic=clock, time=time.time))
    with led(2, wait_s=500) as (address, result):
        report = join(address, write_key(tmp_path / "wrong", bytes(32)), host("stranger"), silent)
        answered.set()
        (found,) = report.problems
        assert "another key" in found.found
        assert found.advice
        assert len(result().hosts) == 1, "it was not let in"


def test_nobody_there_is_a_finding(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PATIENCE_S", 0.5)
    with socket.create_server(("127.0.0.2", 0)) as listener:
        port = listener.getsockname()[1]
    report = join(f"127.0.0.2:{port}", key, host("early"), silent)
    (found,) = report.problems
    assert "refused the connection" in found.found
    assert [one.name for one in report.hosts] == ["early"], "what is wrong here is told all the same"


def test_a_leader_that_gives_up_says_so(key: Path) -> None:
    def broken() -> Host:
        asked.wait(30)
        raise RuntimeError("the disk is on fire")

    asked = threading.Event()

    def arriving() -> Host:
        asked.set()
        return host("second")()

    with ThreadPoolExecutor(1) as pool, LeaderSocket(LISTEN, AUTHORITY) as door:
        leader = pool.submit(Leader(door, "first", 2, 60.0, silent).hold, broken)
        report = join(door.address.removeprefix("tcp://"), key, arriving, silent)
        with pytest.raises(RuntimeError, match="on fire"):
            leader.result()
    (found,) = report.problems
    assert "first has given up: the disk is on fire" in found.found


def test_a_member_that_dies_while_it_measures(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "ROUND_S", 1.0)
    with led(3) as (address, result), ThreadPoolExecutor(1) as pool:
        alive = pool.submit(join, address, key, host("alive"), silent)
        endpoint, authority = way_in(address, key)
        with MeasuringServer("127.0.0.2") as server:
            pass  # nobody is behind it any more
        with Connection(endpoint, authority) as mine:
            _, samples = mine.ask()
            mine.send(messages.Arrived(host("dead")(), skew(samples), server.address, server.token))
            report = result()
        assert alive.result() == report
    broken = {(link.source, link.target) for link in report.links if link.error}
    assert broken
    assert all("dead" in way for way in broken)


# --- measuring -------------------------------------------------------------------------------------------------------


def test_only_who_has_the_token_may_measure() -> None:
    with MeasuringServer("127.0.0.1") as server:
        (stranger,) = measure("a", "b", server.address, bytes(TOKEN_BYTES))
        assert stranger.error
        to, back = measure("a", "b", server.address, server.token)
        assert (to.source, to.target, back.source, back.target) == ("a", "b", "b", "a")
        assert to.bytes_per_s > 0 < back.bytes_per_s
        assert not to.error


def test_a_stranger_that_says_nothing_holds_nobody_up_for_long() -> None:
    with MeasuringServer("127.0.0.1") as server:
        host_name, _, port = server.address.rpartition(":")
        with socket.create_connection((host_name, int(port))):
            assert not measure("a", "b", server.address, server.token)[0].error


def test_a_door_that_is_closed() -> None:
    with MeasuringServer("127.0.0.1") as server:
        door = server.address
    (link,) = measure("a", "b", door, bytes(TOKEN_BYTES))
    assert "refused" in link.error


def test_without_a_key_nobody_is_asked() -> None:
    report = join("127.0.0.2:5", None, host("nobody"), silent)
    (found,) = report.problems
    assert "you need its key file" in found.found
