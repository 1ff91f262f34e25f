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

import psutil
import pytest

from distbelief.control.credentials import Authority
from distbelief.control.keyfiles import new_key, read_key
from distbelief.control.signatures import CONNECTIONS_CLOSED
from tests.support.runs.command import JOBS, processes_of
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
    known = json.loads((run.folder / "coordinator.json").read_text())
    authority = Authority(bytes.fromhex(known["secret"]), known["start"])
    credentials = [
        authority.owner(),
        authority.worker(0),
        authority.worker(1),
        authority.server(0),
        authority.server(1),
    ]
    raw = [
        read_key(tmp_path / "key"),
        authority.secret,
        *(one.token for one in credentials),
        *(one.peer_key for one in credentials if one.peer_key),
    ]
    forms = [form for one in raw for form in (one, one.hex().encode(), base64.b64encode(one), repr(one).encode())]

    def shown(where: str, content: bytes) -> list[str]:
        return [where for form in forms if form in content]

    found: list[str] = []
    for process in processes_of(run.run.mark):
        for what in ("cmdline", "environ"):
            found += shown(f"{what} of {process.pid}", Path(f"/proc/{process.pid}/{what}").read_bytes())
    private = []
    for path in [Path(folder, name) for folder, _, names in os.walk(run.folder) for name in names]:
        with contextlib.suppress(FileNotFoundError):  # it was but a draft
            if path.stat().st_mode & 0o077 == 0:
                private.append(path.name)
            else:
                found += shown(str(path), path.read_bytes())
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
