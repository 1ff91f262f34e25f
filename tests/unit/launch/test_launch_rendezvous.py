"""Ways to meet: the notice of the first process is read, a dead launch's is not, and nobody waits for ever."""

from __future__ import annotations

import socket
import stat
import threading
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from distbelief.control.credentials import KeyAuthority
from distbelief.control.keyfiles import new_key, read_key, run_secret
from distbelief.errors import DistBeliefError
from distbelief.launch import rendezvous
from distbelief.launch.launch import Invitation
from distbelief.launch.rendezvous import KnownAddress, LauncherStore, Notice, SharedFolder

ADDRESS = "tcp://10.0.0.1:5555"
RUN = KeyAuthority(bytes(range(32)), "start").run
NOTICE = Notice(ADDRESS, RUN)


def test_in_a_folder_the_invitation_is_found_and_nothing_is_left(tmp_path: Path) -> None:
    first, other = SharedFolder(tmp_path / "run", "job 1"), SharedFolder(tmp_path / "run", "job 1")
    threading.Timer(0.3, first.tell, [NOTICE]).start()
    assert other.wait(30) == Invitation(ADDRESS, RUN)
    file = tmp_path / "run" / rendezvous.FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    first.close()
    assert list((tmp_path / "run").iterdir()) == []


def test_with_a_key_the_secret_is_not_in_the_folder(tmp_path: Path) -> None:
    key = tmp_path / "key"
    new_key(key)
    access = KeyAuthority(run_secret(read_key(key)))
    run = access.of_start("start")
    first, other = (SharedFolder(tmp_path / "run", "job", key=key) for _ in range(2))
    assert first.key_file() == key
    first.tell(Notice(ADDRESS, run))
    told = (tmp_path / "run" / rendezvous.FILE).read_bytes()
    assert msgspec.json.decode(told)["notice"] == {"address": ADDRESS, "run": None, "over": -1}
    assert other.wait(5) == Invitation(ADDRESS, access)


@pytest.mark.parametrize("first_has_it", [True, False])
def test_a_key_that_only_some_processes_were_given(tmp_path: Path, first_has_it: bool) -> None:
    key = tmp_path / "key"
    new_key(key)
    SharedFolder(tmp_path, "job", key=key if first_has_it else None).tell(NOTICE)
    with pytest.raises(DistBeliefError, match="was given a key file") as caught:
        SharedFolder(tmp_path, "job", key=None if first_has_it else key).wait(5)
    assert "--key FILE to all processes" in caught.value.hint


def test_what_a_dead_launch_has_left_in_a_folder_means_nothing(tmp_path: Path) -> None:
    SharedFolder(tmp_path, "job 1").tell(NOTICE)
    with pytest.raises(DistBeliefError, match="has published no address"):
        SharedFolder(tmp_path, "job 2").wait(0.5)
    (tmp_path / rendezvous.FILE).write_text("{")
    with pytest.raises(DistBeliefError, match="has published no address"):
        SharedFolder(tmp_path, "job 1").wait(0.1)


def test_that_there_is_no_run_is_heard_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LINGER_S", 0.0)
    first = SharedFolder(tmp_path / "run", "job")
    first.tell(Notice(over=2))
    word = SharedFolder(tmp_path / "run", "job").wait(5)
    assert word == 2
    first.close()
    assert not (tmp_path / "run").exists(), "it never began"


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DistBeliefError, match="cannot publish the run's address"):
        SharedFolder(tmp_path / "file" / "run", "job").tell(Notice(over=1))


@pytest.fixture
def key(tmp_path: Path) -> Path:
    new_key(tmp_path / "key")
    return tmp_path / "key"


def test_at_an_address_the_key_is_the_invitation(key: Path) -> None:
    meeting = KnownAddress("node7:2222", key)
    assert meeting.wait() == Invitation("tcp://node7:2222", KeyAuthority(run_secret(read_key(key))))
    assert KnownAddress("127.0.0.1:2222", key).listen() == "tcp://127.0.0.1:2222"
    assert KnownAddress("[::1]:2222", key).listen() == "tcp://[::1]:2222"


def test_an_address_that_is_not_ours(key: Path) -> None:
    with pytest.raises(DistBeliefError, match="none of the addresses of this machine"):
        KnownAddress("203.0.113.9:2222", key).listen()


def test_on_the_launchers_board_only_the_address_stands(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distbelief.launch.rendezvous.LINGER_S", 0.0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    where = f"127.0.0.1:{store.port}"
    first, other = LauncherStore(where, "job", key), LauncherStore(where, "job", key)
    assert first.listen() == "tcp://127.0.0.1:*"
    first.tell(NOTICE)
    assert store.get("distbelief job") == ADDRESS.encode()
    assert other.wait() == Invitation(ADDRESS, KeyAuthority(run_secret(read_key(key))))
    LauncherStore(where, "next", key).tell(Notice(over=3))
    assert LauncherStore(where, "next", key).wait() == 3
    with pytest.raises(DistBeliefError, match="has published no address"):
        LauncherStore(where, "another", key, patience_s=0.2).wait()


def test_which_address_of_ours_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {"10.1.0.9": "10.1.0.1", "198.51.100.1": "10.2.0.1"}
    names = {"peer": ["10.1.0.9"], "me": ["127.0.1.1"]}
    mine = ["10.1.0.1", "10.2.0.1"]
    monkeypatch.setattr(rendezvous, "_own_addresses", lambda: mine)
    monkeypatch.setattr(rendezvous, "resolve", lambda name: names.get(name, []))
    monkeypatch.setattr(rendezvous, "_source_towards", lambda address: routes.get(address, ""))
    monkeypatch.setattr(rendezvous, "host_name", lambda: "me")
    assert rendezvous.address_for(["me", "unknown", "peer"]) == "10.1.0.1", "that from which the peer is reached"
    assert rendezvous.address_for(["unknown"]) == "10.2.0.1", "that from which the world is reached"
    names["me"] = ["10.1.0.1"]
    assert rendezvous.address_for([]) == "10.1.0.1", "that which our name stands for"
    names.clear()
    routes.clear()
    with pytest.raises(DistBeliefError, match="several addresses"):
        rendezvous.address_for([])
    del mine[1]
    assert rendezvous.address_for([]) == "10.1.0.1"
    mine.clear()
    assert rendezvous.address_for([]) == "127.0.0.1"


def test_real_addresses_are_no_loopback() -> None:
    for address in rendezvous._own_addresses():
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as taken:
            taken.bind((address, 0))
        assert not address.startswith("127.")


def test_waiting_is_not_for_ever(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(DistBeliefError):
        SharedFolder(tmp_path, "job").wait(0.3)
    assert time.monotonic() - began >= 0.3
