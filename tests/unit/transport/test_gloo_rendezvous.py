"""Where torch groups meet: members are heard, strangers are not, and a wait can be given up."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import zmq
from torch.distributed import DistStoreError

from distbelief.control.credentials import Authority, KeyAuthority
from distbelief.transport.abort import Abort, Aborted
from distbelief.transport.gloo.rendezvous import RendezvousStore
from distbelief.transport.gloo.rendezvousserver import Answer, KeyTable, Set, Wait, serve

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


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from distbelief.transport.gloo import rendezvousserver

    monkeypatch.setattr(rendezvousserver, "MAX_KEYS", 10)
    monkeypatch.setattr(rendezvousserver, "MAX_WAITING", 10)
    table = KeyTable()
    for number in range(100):
        assert table.hear(b"%d" % number, Wait(number, ["never"])) == []
        assert table.hear(b"me", Set(number, f"key {number}", b"v")) == [(b"me", Answer(number, []))]
    assert len(table._kept) == len(table._waiting) == 10
    answers = table.hear(b"me", Set(1, "never", b"v"))
    assert [asker for asker, _ in answers] == [b"me", *(b"%d" % number for number in range(90, 100))]
