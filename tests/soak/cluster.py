"""The run under test: two hosts that are network namespaces, two workers each, and a small disk for the run directory.

Host 1 leads (`distbelief train --workers 2 --listen`), on a terminal of its own or detached; host 2 joins
(`distbelief worker --count 2`). This module starts, finds and ends the processes; which fault strikes it does not know.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from distbelief.chaos.falseclock import FalseClock, library
from distbelief.chaos.follow import RunFollower
from distbelief.chaos.fulldisk import FullDisk
from distbelief.control.keyfiles import new_key
from tests.soak.sampling import roles
from tests.support.hosts import Lab
from tests.support.runs.command import MARK, REPOSITORY
from tests.support.smalldisk import small_disk

JOB = Path(__file__).parent / "job.py"
TERMINAL = REPOSITORY / "tests" / "support" / "runs" / "terminal.py"
WHERE = "10.77.0.1:5555"
EACH = 2
"""Workers of a host."""
WANTED = 2 * EACH
DISK = "192m"
ENDING_S = 120.0
"""A command that was asked to end has ended by then."""


class Broken(Exception):
    """The run did not do what it promises."""


class Cluster:
    """A context manager: on leaving it, nothing of the run is there any more."""

    def __init__(self, folder: Path, nap_s: float, save_every: str) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self.run_dir = folder / "disk" / "run"
        self.said = folder / "said"
        """What each command printed, in the order of their starts."""
        self.temporary = folder / "tmp"
        self.clock: FalseClock | None = None
        self._nap_s = nap_s
        self._save_every = save_every
        self._stack = contextlib.ExitStack()
        self._commands = 0
        self._lead: subprocess.Popen[bytes] | None = None
        self._terminal_end: Path | None = None
        self._host2: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Cluster:
        try:
            for path in (self.said, self.temporary):
                path.mkdir()
            self.lab = self._stack.enter_context(Lab(2))
            self.disk: FullDisk = self._stack.enter_context(small_disk(self.folder / "disk", DISK))
            self._environment = {**os.environ, MARK: self.mark, "TMPDIR": str(self.temporary)}
            self._environment["PYTHONPATH"] = str(REPOSITORY)
            if library():
                self.clock = self._stack.enter_context(FalseClock())
                self._environment |= self.clock.environment(self._environment)
            new_key(self.folder / "run.key")
            self.follower = RunFollower(self.run_dir)
            self._stack.callback(self._end_all)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _end_all(self) -> None:
        for processes in roles(self.mark, ()).values():
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        for command in (self._lead, self._host2):
            if command is not None:
                command.kill()
                command.wait()

    # --- what is there -----------------------------------------------------------------------------------------------

    def step(self) -> int:
        return self.follower.poll().step

    def members(self) -> list[dict[str, Any]]:
        """Of the newest generation."""
        self.follower.poll()
        generations = (one for one in reversed(self.follower.records) if one["kind"] == "generation")
        return list(next(generations, {"members": []})["members"])

    def is_whole(self) -> bool:
        """All wanted members live, on both hosts."""
        members = self.members()
        hosts = {self.host_of(member) for member in members}
        living = all(is_alive(int(member["pid"])) for member in members)
        return living and len(members) == WANTED and hosts == {1, 2}

    @staticmethod
    def host_of(member: dict[str, Any]) -> int:
        """A host whose agent came back while its old one was still waited for has a number after its name."""
        return int(str(member["host"]).removeprefix("host")[0])

    def by_role(self) -> dict[str, list[psutil.Process]]:
        return roles(self.mark, {int(member["pid"]) for member in self.members()})

    def one(self, role: str, of: psutil.Process | None = None) -> psutil.Process:
        """The process of that role; of several, the one below `of`."""
        for process in self.by_role().get(role, []):
            with contextlib.suppress(psutil.Error):
                if of is None or of.pid in {parent.pid for parent in process.parents()}:
                    return process
        raise Broken(f"there is no {role}")

    # --- commands ----------------------------------------------------------------------------------------------------

    def start(self, host: int, *arguments: object, prefix: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """Start `distbelief ARGUMENTS` on a host; what it prints is in a file of its own."""
        self._commands += 1
        log = self.said / f"{self._commands:03}-host{host}-{arguments[0]}.txt"
        with log.open("wb") as output:
            return subprocess.Popen(
                [*self.lab.inside(host), *prefix, sys.executable, "-m", "distbelief.cli.main", *map(str, arguments)],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def call(self, *arguments: object, limit_s: float = ENDING_S) -> str:
        """Run `distbelief ARGUMENTS` on host 1 to its end."""
        command = self.start(1, *arguments)
        try:
            status = command.wait(limit_s)
        except subprocess.TimeoutExpired:
            command.kill()
            command.wait()
            raise Broken(f"distbelief {arguments[0]} did not return within {limit_s:.0f} s") from None
        said = self._said_by(command)
        if status:
            raise Broken(f"distbelief {' '.join(map(str, arguments))} failed with {status}: {said[-1000:]}")
        return said

    def _said_by(self, command: subprocess.Popen[bytes]) -> str:
        newest = sorted(self.said.iterdir())[-1]
        return newest.read_text(errors="replace")

    def begin(self) -> None:
        self._start_lead("train", JOB, "--set", f"nap_s={self._nap_s}", "--workers", EACH, "--listen", WHERE,
                         "--run-dir", self.run_dir, "--save-every", self._save_every)  # fmt: skip
        self.start_host2()

    def resume(self, detached: bool) -> None:
        """Lead again, after the leading process has ended."""
        if detached:
            shown = json.loads(
                self.call("resume", self.run_dir, "--key", "run.key", "--detach", "--json").splitlines()[-1]
            )
            self._lead_process = psutil.Process(int(shown["pid"]))
        else:
            self._start_lead("resume", self.run_dir)

    def _start_lead(self, *arguments: object) -> None:
        self._terminal_end = self.folder / f"gone-{self._commands}"
        terminal = (sys.executable, str(TERMINAL), str(self._terminal_end), "env", "--default-signal=HUP", "TERM=dumb")
        self._lead = self.start(1, *arguments, "--key", "run.key", "--plain", prefix=terminal)
        deadline = time.monotonic() + ENDING_S
        while not self.by_role().get("lead"):
            if self._lead.poll() is not None or time.monotonic() > deadline:
                raise Broken(f"distbelief {arguments[0]} did not start: {self._said_by(self._lead)[-1000:]}")
            time.sleep(0.05)
        self._lead_process = self.one("lead")

    @property
    def lead(self) -> psutil.Process:
        return self._lead_process

    def drop_terminal(self) -> bool:
        """Close the terminal of the leading process. False: it has none."""
        if self._lead is None or self._terminal_end is None:
            return False
        self._terminal_end.touch()
        return True

    def wait_for_the_leads_end(self) -> None:
        """With it, all processes of host 1 but commands of users end."""
        if self._lead is not None:
            try:
                self._lead.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                raise Broken("the leading process did not end") from None
            self._lead = self._terminal_end = None
        deadline = time.monotonic() + ENDING_S
        while (there := self.by_role()) and (there.get("lead") or there.get("coordinator")):
            if time.monotonic() > deadline:
                raise Broken("the leading process, or its coordinator, did not end")
            time.sleep(0.05)

    def start_host2(self) -> None:
        self._host2 = self.start(2, "worker", "--join", WHERE, "--key", "run.key", "--count", EACH)

    @property
    def agent(self) -> psutil.Process:
        assert self._host2 is not None
        return psutil.Process(self._host2.pid)

    def wait_for_host2s_end(self) -> int:
        assert self._host2 is not None
        try:
            return self._host2.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            raise Broken("the agent of host 2 did not end") from None

    def check_alive(self) -> None:
        """Nothing may end by itself."""
        if not self.lead.is_running() or self.lead.status() == psutil.STATUS_ZOMBIE:
            raise Broken("the leading process ended by itself")
        if self._host2 is not None and self._host2.poll() is not None:
            raise Broken(f"the agent of host 2 ended by itself, with status {self._host2.returncode}")

    def stop(self) -> None:
        """Save and stop, for the end of the soak."""
        self.lead.send_signal(signal.SIGTERM)
        self.wait_for_the_leads_end()
        self.wait_for_host2s_end()

    def last_lines(self, lines: int = 12) -> Iterator[str]:
        """The end of what the newest commands and the run's own logs say."""
        logs = [*sorted(self.said.iterdir())[-4:], *sorted((self.run_dir / "logs").glob("*.log"))]
        for path in logs:
            yield f"--- {path.name}"
            yield from path.read_text(errors="replace").splitlines()[-lines:]


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def until(condition: Callable[[], object], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise Broken(f"{what} did not happen within {limit_s:.0f} s")
        time.sleep(0.05)
