"""Where torch groups meet: members are heard, strangers are not, and a wait can be given up."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import zmq
from torch.distributed import DistStoreError

from distbelief.control.credentials import Authority
from distbelief.transport.gloo.rendezvousmessages import Found, Put, Want
from distbelief.transport.gloo.rendezvousserver import Place, serve
from distbelief.transport.gloo.rendezvousstore import MeetingStore
from distbelief.transport.shm.futexflags import Abort, Aborted

AUTHORITY = Authority(bytes(range(32)), "start")


@pytest.fixture(scope="module")
def address() -> str:
    """Of a place that is there as long as the tests are."""
    ports: list[int] = []
    there = threading.Event()

    def listening(port: int) -> None:
        ports.append(port)
        there.set()

    threading.Thread(target=serve, args=["127.0.0.1", 0, AUTHORITY.server(-1), listening], daemon=True).start()
    assert there.wait(20)
    return f"tcp://127.0.0.1:{ports[0]}"


@pytest.fixture
def two(address: str) -> Iterator[tuple[MeetingStore, MeetingStore]]:
    made = [MeetingStore(address, AUTHORITY.worker(n), 20.0, lambda: None) for n in (1, 2)]
    yield made[0], made[1]
    for one in made:
        one.close()


def test_what_one_says_the_other_hears(two: tuple[MeetingStore, MeetingStore]) -> None:
    one, other = two
    got: list[bytes] = []
    asking = threading.Thread(target=lambda: got.append(other.get("where")))
    asking.start()
    one.set("where", b"here")
    asking.join(20)
    assert got == [b"here"]
    other.wait(["where"])
    assert (one.add("n", 2), other.add("n", 3)) == (2, 5)
    assert one.compare_set("c", "", "x") == b"x"
    assert other.compare_set("c", "", "y") == b"x"
    assert other.compare_set("c", "x", "y") == b"y"
    assert other.compare_set("never", "x", "y") == b"x"  # as torch's own stores answer
    assert (one.check(["where", "c"]), one.check(["where", "nowhere"])) == (True, False)
    assert (one.delete_key("c"), one.delete_key("c"), other.check(["c"])) == (True, False, False)


def test_a_wait_is_given_up(address: str) -> None:
    abort = Abort()
    store = MeetingStore(address, AUTHORITY.worker(3), 20.0, abort.check)
    threading.Timer(0.1, lambda: abort.set("the membership changes")).start()
    with pytest.raises(Aborted, match="the membership changes"):
        store.get("nobody says it")
    store.close()


def test_nobody_comes(address: str) -> None:
    store = MeetingStore(address, AUTHORITY.worker(4), 0.1, lambda: None)
    with pytest.raises(DistStoreError, match="have not met"):
        store.get("nobody says it")
    store.close()


@pytest.mark.parametrize("stranger", [Authority(bytes(32), "start"), Authority(AUTHORITY.secret, "another start")])
def test_strangers_cannot_even_connect(
    address: str, two: tuple[MeetingStore, MeetingStore], stranger: Authority
) -> None:
    store = MeetingStore(address, stranger.worker(1), 0.5, lambda: None)
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
    from distbelief.transport.gloo import rendezvousserver as meetingplace

    monkeypatch.setattr(meetingplace, "KEPT", 10)
    monkeypatch.setattr(meetingplace, "WAITING", 10)
    place = Place()
    for number in range(100):
        assert place.hear(b"%d" % number, Want(number, ["never"])) == []
        assert place.hear(b"me", Put(number, f"key {number}", b"v")) == [(b"me", Found(number, []))]
    assert len(place._kept) == len(place._waiting) == 10
    answers = place.hear(b"me", Put(1, "never", b"v"))
    assert [asker for asker, _ in answers] == [b"me", *(b"%d" % number for number in range(90, 100))]
