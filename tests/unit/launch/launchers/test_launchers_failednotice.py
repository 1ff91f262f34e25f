"""Hosts that come when the run has failed already: each hears so at once, and who leads waits for no others."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from distbelief.control.credentials import KeyAuthority
from distbelief.control.keyfiles import new_key, read_key, run_secret
from distbelief.coordinator.journal import Journal
from distbelief.errors import DistBeliefError, RunFailed, RunInterrupted
from distbelief.launch.joining import serve_host
from distbelief.launch.launch import Invitation
from distbelief.launch.launchers import run
from distbelief.launch.launchers.failednotice import Missing, still_missing, turn_away
from distbelief.launch.launchers.rules.place import Place
from distbelief.launch.launchers.run import LauncherRequest, leading
from distbelief.launch.rendezvous import SharedFolder
from tests.support.ports import free_port

AUTHORITY = KeyAuthority(b"s" * 32, "start")
LONG_S = 60.0  # never waited for, if all is well


@pytest.fixture
def invitation() -> Invitation:
    """Of a launch without a key file."""
    return Invitation(f"tcp://127.0.0.1:{free_port()}", AUTHORITY.run)


def place(peers: tuple[str, ...] = ("n1", "n2", "n3"), launcher: str = "slurm") -> Place:
    return Place(launcher, f"job {time.monotonic_ns()}", 0, 3, 0, 1, host="n1", peers=peers)


def comes(to: Invitation, workers: int = 1) -> str:
    """What the agent of a host is told that offers itself."""
    with pytest.raises(DistBeliefError) as caught:
        serve_host(to, workers, "late", patience_s=30, say=lambda text: None)
    return caught.value.message


def test_everybody_who_comes_is_told_and_then_it_is_over(invitation: Invitation) -> None:
    with ThreadPoolExecutor(2) as hosts:
        said = [hosts.submit(comes, invitation) for _ in range(2)]
        turn_away(invitation.address, AUTHORITY, Missing(2, 2), "the model has no weights", LONG_S)
        for one in said:
            assert one.result(30) == f"the run at {invitation.address} is over: the model has no weights"


def test_whoever_has_another_key_is_not_answered(invitation: Invitation) -> None:
    with ThreadPoolExecutor(1) as hosts:
        stranger = hosts.submit(serve_host, replace(invitation, access=KeyAuthority(b"x" * 32)), 1, "", patience_s=2)
        missing = Missing(1, 1)
        turn_away(invitation.address, AUTHORITY, missing, "no", 3)
        assert not missing.is_empty
        with pytest.raises(DistBeliefError, match=r"answer"):
            stranger.result(30)


def test_an_address_that_somebody_else_has_now_is_no_error(invitation: Invitation) -> None:
    port = int(invitation.address.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        turn_away(invitation.address, AUTHORITY, Missing(1, 1), "no", LONG_S)


def test_who_is_missing_by_the_journal(tmp_path: Path) -> None:
    lines = [
        {"kind": "host", "at": 90.0, "nonce": "of an earlier launch", "room": 1},
        {"kind": "host", "at": 101.0, "nonce": "a", "room": 2},
        {"kind": "host", "at": 102.0, "nonce": "a", "room": 2},
        {"kind": "lost", "at": 103.0},
    ]
    with Journal.open(tmp_path / "journal.jsonl") as journal:
        for line in lines:
            journal.append({"epoch": 1, "reason": "", **line})
    by_name, by_count = place(), replace(place(()), workers=6, workers_here=2)
    assert str(still_missing(by_name, tmp_path, 100.0)) == "1 host"
    assert str(still_missing(by_name, tmp_path, 0.0)) == "0 hosts"
    assert str(still_missing(by_count, tmp_path, 100.0)) == "2 workers"
    assert not still_missing(by_count, tmp_path / "nowhere", 100.0).is_empty


def late(folder: Path, job: str) -> str:
    """A host that finds the word and offers itself."""
    found = SharedFolder(folder, job).wait(30)
    assert not isinstance(found, int)
    return comes(found)


def fail(asked: LauncherRequest, place: Place, said: list[str], invitation: Invitation, error: DistBeliefError) -> None:
    with leading(asked, place, said.append) as lead:
        lead.announce(invitation.address, AUTHORITY)
        raise error


def test_a_run_that_fails_after_it_has_begun_tells_hosts_that_come_later(
    invitation: Invitation, tmp_path: Path
) -> None:
    first, folder = place(("n1", "n2")), tmp_path / "run"
    said: list[str] = []
    asked = LauncherRequest("slurm", "digits", run_dir=folder, listen=invitation.address)
    began = time.monotonic()
    with ThreadPoolExecutor(1) as hosts:
        told = hosts.submit(late, folder, first.job)
        with pytest.raises(RunFailed, match="boom"):
            fail(asked, first, said, invitation, RunFailed("boom in the model"))
        assert told.result(30).endswith("is over: boom in the model")
    assert said == ["boom in the model; waiting up to 60 s to tell 1 host that has not joined yet"]
    assert time.monotonic() - began < run.NOTICE_S, "it does not wait for more than have been missing"
    assert not (folder / "rendezvous.json").exists()


def test_at_a_known_address_also_one_that_never_began(invitation: Invitation, tmp_path: Path) -> None:
    """As TF_CONFIG has it: nobody hears a word, but all know where and have the key."""
    new_key(tmp_path / "key")
    where = invitation.address.removeprefix("tcp://")
    known = replace(place(("n1", "n2"), "tf_config"), address=where)
    access = KeyAuthority(run_secret(read_key(tmp_path / "key")))
    with ThreadPoolExecutor(1) as hosts:
        told = hosts.submit(comes, Invitation(invitation.address, access))
        asked = LauncherRequest("tf_config", "digits", run_dir=tmp_path / "run", key_file=str(tmp_path / "key"))
        with pytest.raises(DistBeliefError, match="no such"), leading(asked, known, lambda text: None):
            raise DistBeliefError("no such job")
        assert told.result(30).endswith("is over: no such job")


def test_who_interrupts_waits_a_moment_only(
    invitation: Invitation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "INTERRUPTED_S", 0.3)
    said: list[str] = []
    asked = LauncherRequest("slurm", "digits", run_dir=tmp_path / "run", listen=invitation.address)
    with pytest.raises(RunInterrupted):
        fail(asked, place(), said, invitation, RunInterrupted("stopped by SIGINT"))
    assert said == ["stopped by SIGINT; waiting up to 0 s to tell 2 hosts that have not joined yet"]
