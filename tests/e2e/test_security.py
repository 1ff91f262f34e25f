"""What others can see and reach of a run: other users of the machine, and whoever reads logs, `ps` and journals."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from distbelief.control import messages as m
from distbelief.control.credentials import Authority, Credential, KeyAuthority
from distbelief.control.keyfiles import new_key, read_key, run_secret
from distbelief.control.signatures import CONNECTIONS_CLOSED
from distbelief.control.sockets import dial
from distbelief.coordinator.client import answer_of, ask, whereabouts
from distbelief.coordinator.server import bind
from distbelief.errors import DistBeliefError
from tests.support.ports import free_port
from tests.support.runs.command import JOBS, Run, processes_of
from tests.support.runs.watched import Watched

INTRUDER = "tests.support.runs.intruder"
STEPS = 600  # of 0.4 s: the run outlasts the intruder


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Not below pytest's own folder: whenever another pytest begins, it closes that to other users."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def run(start: Callable[..., object], tmp_path: Path, wait_until: Callable[..., None]) -> Watched:
    new_key(tmp_path / "key")
    job = [JOBS / "small.py", "--set", f"steps={STEPS}", "--set", "brake_s=0.2"]
    run = Watched(start, tmp_path, wait_until, *job, "--workers", 2, "--strategy", "ps:sync", "--key", "key")  # type: ignore[arg-type]
    run.after(2)
    return run


def listening(processes: list[psutil.Process]) -> list[tuple[str, int]]:
    found = [c for one in processes for c in one.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return [(c.laddr.ip, c.laddr.port) for c in found]


def links(folder: Path) -> list[str]:
    """Where the links in that folder lead. The run goes on: some are gone in a moment."""
    found = []
    for one in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(one))
    return found


def test_nobody_else_sees_or_reaches_a_run(run: Watched, tmp_path: Path) -> None:
    if os.geteuid() == 0:  # only root can become another user
        _another_user_gets_at_nothing(run, tmp_path)
    _secrets_are_nowhere(run, tmp_path)


def _another_user_gets_at_nothing(run: Watched, tmp_path: Path) -> None:
    processes = processes_of(run.run.mark)
    opened = [link for one in processes for link in links(Path(f"/proc/{one.pid}/fd"))]
    assert any("memfd" in link for link in opened), "there are segments that could be opened"
    top = Path(tempfile.gettempdir())
    for folder in (tmp_path, *(one for one in tmp_path.parents if one.is_relative_to(top) and one != top)):
        folder.chmod(0o755)  # the folders let it in: what is in them must not
    doors, pids = listening(processes), [one.pid for one in processes]
    assert len(doors) >= 3
    arguments = [sys.executable, "-m", INTRUDER, str(run.folder), json.dumps(pids), json.dumps(doors)]
    outcome = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert json.loads(outcome.stdout) == []


def _secrets_are_nowhere(run: Watched, tmp_path: Path) -> None:
    _, authority = whereabouts(run.folder)
    key = KeyAuthority(run_secret(read_key(tmp_path / "key")))
    of_key = [read_key(tmp_path / "key"), key.secret, key.applicant().token, key.keys()[1]]
    credentials = [
        authority.owner(),
        authority.worker(0),
        authority.worker(1),
        authority.server(0),
        authority.server(1),
    ]
    raw = [
        *of_key,
        authority.secret,
        *(one.token for one in credentials),
        *(one.peer_key for one in credentials if one.peer_key),
    ]

    def shown(where: str, content: bytes, among: list[bytes] = raw) -> list[str]:
        forms = [form for one in among for form in (one, one.hex().encode(), base64.b64encode(one), repr(one).encode())]
        return [where for form in forms if form in content]

    found: list[str] = []
    for process in processes_of(run.run.mark):
        for what in ("cmdline", "environ"):
            found += shown(f"{what} of {process.pid}", Path(f"/proc/{process.pid}/{what}").read_bytes())
    private = []
    for path in [Path(folder, name) for folder, _, names in os.walk(run.folder) for name in names]:
        with contextlib.suppress(FileNotFoundError):  # it was but a draft
            is_private = path.stat().st_mode & 0o077 == 0
            if is_private:
                private.append(path.name)
            if path.is_file():  # what follows from the key opens every run with this key: it is in no file
                found += shown(str(path), path.read_bytes(), of_key if is_private else raw)
    assert found == []
    assert "coordinator.json" in private
    assert shown("there", (run.folder / "coordinator.json").read_bytes()), "it would be found if it were there"
    result = run.result()
    run.check_workers_lost()
    if os.geteuid() == 0:
        assert result["refused"][CONNECTIONS_CLOSED] >= 300, "the coordinator has counted those that it turned away"
    left = [path for path in run.folder.rglob("*") if path.is_file() and shown(str(path), path.read_bytes())]
    assert left == [], "when the run is over, nothing of it is left"
    assert shown("summary", json.dumps(result).encode()) == []


def test_one_run_directory_opens_no_other_run_with_the_same_key(
    start: Callable[..., Run], tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """Whoever reads it can neither send messages to another run, nor offer a host to it, nor pose as its coordinator.
    The run itself can be joined with it, and the other run with the key."""
    new_key(tmp_path / "key")
    job = [JOBS / "small.py", "--set", "steps=20", "--workers", 1, "--key", "key", "--json"]
    leads = [
        start("coordinator", *job, "--listen", f"127.0.0.2:{free_port()}", "--run-dir", name) for name in ("a", "b")
    ]
    wait_until(lambda: all((tmp_path / name / "parcel.bin").exists() for name in ("a", "b")))
    _, stolen = whereabouts(tmp_path / "a")
    address, other = whereabouts(tmp_path / "b")
    key = KeyAuthority(run_secret(read_key(tmp_path / "key")))

    genuine, forged = [stolen.owner(), stolen.agent()], _made_of(stolen, other.start)
    events = (m.StopRequested("by a stranger"), m.ScaleRequested(5), m.HostOffered("far", "nonce", 1, True))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        dial(socket, address, stolen.coordinator_key)  # it is the same for all runs with the key, and no secret
        for credential in (*genuine, *forged):
            for event in events:
                message = m.encode(event)
                socket.send_multipart([credential.signer().sign(message), message])
        message = m.encode(m.FactsAsked(7))
        socket.send_multipart([key.applicant().signer().sign(message), message])  # arrives after the others
        answers = []
        while not answers or isinstance(answers[-1], m.JoinAgain):
            assert socket.poll(60_000), "the key opens it"
            answers.append(m.decode_command(socket.recv_multipart()[-1]))
        assert len(answers) == len(genuine) * len(events) + 1
        assert isinstance(answers[-1], m.RunFacts)
    for keys in (KeyAuthority(stolen.secret).keys(), KeyAuthority(stolen.coordinator_key[:32]).keys()):
        with zmq.Context() as context:
            false, at = bind(context, keys)
            with false, pytest.raises(DistBeliefError, match="another key"):
                answer_of(at, other.owner(), m.FactsAsked(1), 1.0)
            assert keys[0] != other.coordinator_key

    (tmp_path / "mixed").mkdir()
    known = json.loads((tmp_path / "a" / "coordinator.json").read_text())
    (tmp_path / "mixed" / "coordinator.json").write_text(json.dumps({**known, "address": address}))
    with pytest.raises(DistBeliefError, match="another run with the same key"):
        ask(tmp_path / "mixed", m.StopRequested("of another run"), 60.0)
    by_directory = start("worker", "--join", "a", "--host", "far")
    by_key = start("worker", "--join", address.removeprefix("tcp://"), "--key", "key", "--host", "far")
    results = [lead.wait().json for lead in leads]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    assert [one["refused"] for one in results] == [{}, {"wrongly signed": len(forged) * len(events)}]
    assert [one.wait().status for one in (by_directory, by_key)] == [0, 0]


def _made_of(stolen: Authority, start: str) -> list[Credential]:
    """What can be made of the authority in a run directory for a run with that start (which is no secret)."""
    as_key = KeyAuthority(stolen.secret)
    authorities = [Authority(stolen.secret, b"", start), as_key.of_start(start), as_key.of_start(stolen.start)]
    made = [one for authority in authorities for one in (authority.owner(), authority.agent())]
    return [as_key.applicant(), msgspec.structs.replace(as_key.applicant(), token=stolen.secret), *made]
