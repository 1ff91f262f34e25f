"""The `distbelief` command as tests start it, and what a run may leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).parents[3]


JOBS = REPOSITORY / "tests" / "e2e" / "jobs"


MARK = "DISTBELIEF_TEST_RUN"  # inherited by every process of a run, so that leftovers can be found


@dataclass(frozen=True)
class Outcome:
    status: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.status == 0, f"exit status {self.status}\n{self.stdout}\n{self.stderr}"
        result: dict[str, Any] = json.loads(self.stdout.strip().splitlines()[-1])
        return result


def processes_of(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


_FAKETIME = re.compile(r"(sem\.)?faketime_")
"""libfaketime's own segments, in the tests of clocks: a process that is killed leaves them."""


def left_in_shared_memory(before: set[str], patience_s: float = 10) -> set[str]:
    """What is new there and stays, and is nobody's any more. What other programs of this machine have is in use, or
    goes again."""
    deadline = time.monotonic() + patience_s
    left = set(os.listdir("/dev/shm")) - before
    while left and time.monotonic() < deadline:
        left = {name for name in left if not _FAKETIME.match(name) and is_ours(name) and not is_in_use(name)}
        time.sleep(0.2 * bool(left))
    return left


def is_ours(segment: str) -> bool:
    """It exists and belongs to this user: only root sees whether a segment of somebody else is in use."""
    try:
        return Path("/dev/shm", segment).stat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def is_in_use(segment: str) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if f"/dev/shm/{segment}\n" in maps.read_text():
                return True
    return False


class Run:
    """One `distbelief` command, started and waited for."""

    def __init__(self, folder: Path, *arguments: object, prefix: Sequence[str] = ()) -> None:
        self.mark = uuid.uuid4().hex
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "distbelief.cli.main", *map(str, arguments)],
            cwd=folder,
            env={**os.environ, MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def status(self) -> int | None:
        """None while it goes on."""
        return self._process.poll()

    def has_printed(self) -> bool:
        """Something that nobody has read yet."""
        return bool(select.select([self._process.stdout, self._process.stderr], [], [], 0)[0])

    def wait(self, timeout_s: float = 500) -> Outcome:
        stdout, stderr = self._process.communicate(timeout=timeout_s)
        return Outcome(self._process.returncode, stdout, stderr)

    def leftovers(self, patience_s: float = 10) -> list[str]:
        """Processes still there after a while (the kernel needs moments to end killed ones)."""
        deadline = time.monotonic() + patience_s
        while (left := processes_of(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [" ".join(p.cmdline()) for p in left]

    def kill(self) -> None:
        for process in processes_of(self.mark):
            process.kill()
