"""Where torch groups meet: members are heard, strangers are not, and a wait can be given up."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq
from torch.distributed import DistStoreError

from distbelief.control.credentials import Authority, KeyAuthority
from distbelief.transport.abort import Abort, Aborted
from distbelief.transport.gloo.rendezvous import RendezvousStore
from distbelief.transport.gloo.rendezvousserver import (
    Add,
    Answer,
    Check,
    KeyTable,
    Request,
    Set,
    Wait,
    serve,
)

KEY = KeyAuthority(bytes(range(32)))
AUTHORITY = KEY.of_start("start")


@pytest.fixture(scope="module")
def address() -> str:
    """Of a server that runs as long as the tests are."""
    ports: list[int] = []
    there = threading.Event()

    def listening(port: int) -> None:
        ports.append(port)
        there.set()

    threading.Thread(target=serve, args=["127.0.0.1", 0, AUTHORITY.server(-1), listening], daemon=True).start()
    assert there.wait(20)
    return f"tcp://127.0.0.1:{ports[0]}"


@pytest.fixture
def two(address: str) -> Iterator[tuple[RendezvousStore, RendezvousStore]]:
    made = [RendezvousStore(address, AUTHORITY.worker(n), 20.0, lambda: None) for n in (1, 2)]
    yield made[0], made[1]
    for one in made:
        one.close()


def test_what_one_says_the_other_hears(two: tuple[RendezvousStore, RendezvousStore]) -> None:
    one, other = two
    got: list[bytes] = []
    asking = threading.Thread(target=lambda: got.append(other.get("where")))
    asking.start()
    one.set("where", b"here")
    asking.join(20)
    assert got == [b"here"]
    other.wait(["where"])
    assert (one.add("n", 2), other.add("n", 3)) == (2, 5)
    assert (one.check(["where", "n"]), one.check(["where", "nowhere"])) == (True, False)


def test_a_wait_is_given_up(address: str) -> None:
    abort = Abort()
    store = RendezvousStore(address, AUTHORITY.worker(3), 20.0, abort.check)
    threading.Timer(0.1, lambda: abort.set("the membership changes")).start()
    with pytest.raises(Aborted, match="the membership changes"):
        store.get("nobody says it")
    store.close()


def test_nobody_comes(address: str) -> None:
    store = RendezvousStore(address, AUTHORITY.worker(4), 0.1, lambda: None)
    with pytest.raises(DistStoreError, match="did not connect"):
        store.get("nobody says it")
    store.close()


@pytest.mark.parametrize("stranger", [KeyAuthority(bytes(32)).of_start("start"), KEY.of_start("another start")])
def test_strangers_cannot_even_connect(
    address: str, two: tuple[RendezvousStore, RendezvousStore], stranger: Authority
) -> None:
    store = RendezvousStore(address, stranger.worker(1), 0.5, lambda: None)
    with pytest.raises(DistStoreError):
        store.set("where", b"elsewhere")
    store.close()
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(address)
        plain.send_multipart([b"", b"x"])
        assert not plain.poll(300)
    two[0].set("where", b"here")
    assert two[1].get("where") == b"here"


@pytest.mark.parametrize("request_", [Set(1, "first", "a", b"v"), Wait(1, "first", ["a"]), Add(1, "first", "a", 1)])
def test_a_client_of_an_earlier_server_is_answered_at_once_and_changes_nothing(request_: Request) -> None:
    table = KeyTable("second")
    assert table.hear(b"me", request_) == [(b"me", Answer(1, "second", []))]
    assert table.hear(b"me", Check(2, "", ["a"])) == [(b"me", Answer(2, "second", []))]


@pytest.fixture
def replaceable() -> Iterator[Callable[[int], tuple[subprocess.Popen[str], int]]]:
    """Start a server in a process of its own, at this port (0: any). Returns the process and its port."""
    started: list[subprocess.Popen[str]] = []

    def start(port: int) -> tuple[subprocess.Popen[str], int]:
        started.append(subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        return started[-1], int(started[-1].stdout.readline())

    yield start
    for one in started:
        one.kill()
        one.communicate()


SERVER = """
import sys
from distbelief.control.credentials import KeyAuthority
from distbelief.transport.gloo.rendezvousserver import serve
credential = KeyAuthority(bytes(range(32))).of_start("start").server(-1)
serve("127.0.0.1", int(sys.argv[1]), credential, lambda port: print(port, flush=True))
"""


@pytest.mark.parametrize("ask", [lambda store: store.get("lost"), lambda store: store.add("n", 1)], ids=["get", "add"])
def test_a_member_learns_that_the_server_was_replaced(
    replaceable: Callable[[int], tuple[subprocess.Popen[str], int]], ask: Callable[[RendezvousStore], object]
) -> None:
    """Its keys are lost; without this, members of a group that is not complete would wait for each other."""
    first, port = replaceable(0)
    store = RendezvousStore(f"tcp://127.0.0.1:{port}", AUTHORITY.worker(5), 60.0, lambda: None)
    newcomer = RendezvousStore(f"tcp://127.0.0.1:{port}", AUTHORITY.worker(6), 60.0, lambda: None)
    store.set("lost", "here")
    first.kill()
    first.wait()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, store)
        assert replaceable(port)[1] == port
        with pytest.raises(DistStoreError, match="another one has taken its place"):
            answer.result()
    newcomer.set("kept", "here")
    assert newcomer.get("kept") == b"here"
    store.close()
    newcomer.close()


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from distbelief.transport.gloo import rendezvousserver

    monkeypatch.setattr(rendezvousserver, "MAX_KEYS", 10)
    monkeypatch.setattr(rendezvousserver, "MAX_WAITING", 10)
    table = KeyTable("first")
    for number in range(100):
        assert table.hear(b"%d" % number, Wait(number, "", ["never"])) == []
        assert table.hear(b"me", Set(number, "first", f"key {number}", b"v")) == [(b"me", Answer(number, "first", []))]
    assert len(table._kept) == len(table._waiting) == 10
    answers = table.hear(b"me", Set(1, "first", "never", b"v"))
    assert [asker for asker, _ in answers] == [b"me", *(b"%d" % number for number in range(90, 100))]
