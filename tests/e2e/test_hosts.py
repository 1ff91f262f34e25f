"""Several hosts on one machine, as they are used by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.hosts import Lab, why_not
from tests.support.runs.command import REPOSITORY

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def hosts(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.hosts", *arguments], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )


def spaces() -> set[str]:
    return set(os.listdir("/run/netns")) if os.path.exists("/run/netns") else set()


def test_a_command_runs_once_on_every_host() -> None:
    command = (
        "echo $(hostname) $DISTBELIEF_HOST $HOST_INDEX {host} {address} {address6}; test $HOST_INDEX != 2 || exit 7"
    )
    process = hosts("3", "--", "sh", "-c", command)
    said, _ = process.communicate(timeout=300)
    assert sorted(said.splitlines()) == [
        f"host{k} | host{k} host{k} {k} host{k} 10.77.0.{k} fd77::{k}" for k in (1, 2, 3)
    ]
    assert process.returncode == 7
    assert not [space for space in spaces() if space.startswith(f"db{process.pid}x")]


def test_hosts_know_each_other_by_name_and_labs_do_not_see_each_other(tmp_path: Path) -> None:
    ask = "import socket; print(socket.create_connection((%r, 5000), 5).recv(9).decode())"
    serve = "import socket; s = socket.create_server(('', 5000)); print('up', flush=True); s.accept()[0].send(b%r)"
    with Lab(2) as one, Lab(2) as other:
        for lab, word in ((one, "one"), (other, "other")):
            server = subprocess.Popen(
                [*lab.inside(1), sys.executable, "-c", serve % word], stdout=subprocess.PIPE, text=True
            )
            assert server.stdout is not None
            server.stdout.readline()
            asked = [*lab.inside(2), sys.executable, "-c", ask % "host1"]
            assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip() == word
            server.wait(30)
            server.stdout.close()


def test_ctrl_c_ends_everything(wait_until: Callable[[Callable[[], object]], None]) -> None:
    process = hosts("2", "--", "sh", "-c", "echo up; exec sleep 1000")
    assert process.stdout is not None
    assert {process.stdout.readline().strip() for _ in range(2)} == {"host1 | up", "host2 | up"}
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == 130
    wait_until(lambda: not [space for space in spaces() if space.startswith(f"db{process.pid}x")])


def test_what_a_killed_lab_left_is_removed_by_the_next(wait_until: Callable[[Callable[[], object]], None]) -> None:
    process = hosts("1")
    assert process.stdout is not None
    process.stdout.readline()
    assert [space for space in spaces() if space.startswith(f"db{process.pid}x")]
    process.kill()
    process.communicate()
    Lab(1).close()
    assert not [space for space in spaces() if space.startswith(f"db{process.pid}x")]
