"""How an outside process finds a coordinator, or the reason why there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from distbelief.control.addresses import host_name
from distbelief.control.messages import CheckpointRequested
from distbelief.coordinator.client import Advertisement, ask, seems_gone, whereabouts
from distbelief.errors import DistBeliefError

KNOWN = Advertisement("tcp://127.0.0.1:1", "a start", "00" * 32, "k" * 40)


def advertise(run_dir: Path, **changes: object) -> None:
    content = {**msgspec.to_builtins(KNOWN), "host": host_name(), **changes}
    (run_dir / "coordinator.json").write_bytes(msgspec.json.encode(content))


def ended_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def test_a_coordinator_that_is_there_or_gone(tmp_path: Path) -> None:
    assert seems_gone(tmp_path)
    command = [sys.executable, "-c", "print(flush=True); input()", "distbelief.coordinator"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        advertise(tmp_path, pid=process.pid)
        assert not seems_gone(tmp_path)
        advertise(tmp_path, pid=os.getpid())  # the number belongs to another process by now
        assert seems_gone(tmp_path)
        advertise(tmp_path, pid=os.getpid(), host="another host")
        assert not seems_gone(tmp_path)
        advertise(tmp_path, pid=os.getpid(), processes="of a container whose host has the same name")
        assert not seems_gone(tmp_path)
        advertise(tmp_path, pid=process.pid)
        process.communicate(b"\n")
    assert seems_gone(tmp_path)


def test_a_run_whose_processes_were_killed_is_told_apart_from_a_bad_network(tmp_path: Path) -> None:
    gone = ended_process()
    advertise(tmp_path, pid=gone, launcher=gone)
    with pytest.raises(DistBeliefError, match="is not running, and did not end in order") as caught:
        ask(tmp_path, CheckpointRequested(), timeout_s=600)
    assert f"distbelief resume {tmp_path}" in caught.value.hint
    advertise(tmp_path, pid=gone, launcher=os.getpid())  # it starts another coordinator
    with pytest.raises(DistBeliefError, match="does not answer"):
        ask(tmp_path, CheckpointRequested(), timeout_s=0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"run_secret": "zz"},
        {"address": "garbage"},
        {"address": "tcp://"},
        {"address": "tcp://10.0.0.1:99999"},
        {"coordinator_key": "short"},
        {"pid": "x"},
        {"start": None},
    ],
)
def test_a_file_that_is_damaged_is_one_sentence(tmp_path: Path, changes: dict[str, object]) -> None:
    advertise(tmp_path, **changes)
    with pytest.raises(DistBeliefError, match=r"coordinator\.json cannot be used: "):
        whereabouts(tmp_path)
    assert not seems_gone(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"[]", b'{"address":"tcp://127.0.0.1:1"}'])
def test_no_content_of_the_file_is_a_traceback(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "coordinator.json").write_bytes(content)
    with pytest.raises(DistBeliefError, match=r"coordinator\.json cannot be used: "):
        whereabouts(tmp_path)
