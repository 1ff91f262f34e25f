"""Processes of one launch on one host: cores lent, the status told, nobody waits for ever."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from distbelief.errors import DistBeliefError
from distbelief.launch.launchers import samehost
from distbelief.launch.launchers.rules.place import Place
from distbelief.launch.launchers.samehost import HelpingProcess, HostingProcess


def places(count: int, job: str = "") -> list[Place]:
    job = job or f"{os.getpid()} {time.monotonic_ns()}"
    return [Place("mpi", job, index, count, index, count) for index in range(count)]


def lodge(place: Place, patience_s: float = samehost.PATIENCE_S) -> int:
    return HelpingProcess(place, patience_s).wait()


@pytest.fixture
def beside() -> Iterator[Callable[..., Future[int]]]:
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


def test_the_one_that_hosts_has_the_cores_of_all_and_the_others_its_status(
    beside: Callable[..., Future[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own: dict[str, set[int]] = {"MainThread": {0}}
    monkeypatch.setattr(
        samehost.os, "sched_getaffinity", lambda _: own.get(threading.current_thread().name, {3, 7}), raising=True
    )
    first, *others = places(4)
    waiting = [beside(lodge, other) for other in others]
    there = HostingProcess(first)
    assert there.cores == {0, 3, 7}
    assert not any(future.done() for future in waiting)
    there.tell(17)
    assert [future.result(10) for future in waiting] == [17, 17, 17]


def test_a_host_that_vanishes_ends_the_others(beside: Callable[..., Future[int]]) -> None:
    first, other = places(2)
    waiting = beside(lodge, other)
    there = HostingProcess(first)
    for connection in there._others:
        connection.close()
    assert waiting.result(10) == 1


def test_one_process_alone_needs_nobody() -> None:
    there = HostingProcess(places(1)[0])
    assert there.cores == os.sched_getaffinity(0)
    there.tell(0)


def test_who_does_not_come_is_not_awaited_for_ever(
    beside: Callable[..., Future[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock jumps when the hosting process has accepted one other, so that it is in time on a busy machine too."""
    first, other, _ = places(3)
    hosting, connected = threading.current_thread(), threading.Event()
    user_of = samehost._user_of

    def user_of_and_jump(peer: socket.socket) -> int:
        if threading.current_thread() is hosting:
            connected.set()
        return user_of(peer)

    def clock() -> float:
        return time.monotonic() + (1000 if connected.is_set() else 0)

    monkeypatch.setattr(samehost, "_user_of", user_of_and_jump)
    monkeypatch.setattr(samehost, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    waiting = beside(lodge, other)
    with pytest.raises(DistBeliefError, match="1 of 3 processes on this host have not appeared"):
        HostingProcess(first, patience_s=500)
    assert waiting.result(10) == 1
    with pytest.raises(DistBeliefError, match="has not appeared"):
        lodge(places(2)[1], patience_s=0.1)


def test_two_runs_of_one_launch_are_refused() -> None:
    first = places(2)[0]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken:
        taken.bind(samehost._name(first))
        with pytest.raises(DistBeliefError, match="another process hosts for this launch"):
            HostingProcess(first)


def test_launches_do_not_mix(beside: Callable[..., Future[int]]) -> None:
    ours, theirs = places(2, "one"), places(2, "two")
    waiting = {status: beside(lodge, pair[1]) for status, pair in ((3, ours), (4, theirs))}
    for status, pair in ((4, theirs), (3, ours)):
        HostingProcess(pair[0]).tell(status)
    assert {status: future.result(10) for status, future in waiting.items()} == {3: 3, 4: 4}
