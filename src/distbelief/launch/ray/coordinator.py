"""The coordinator as an actor that Ray restarts: on the head node, under the run's name.

The actor leads the run (lead.py) without workers of its own. When it dies, Ray starts it again and repeats the pending
call; the actor then replays the journal and listens at the same address as before. Agents and workers continue to train
and find it by themselves.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from distbelief.control.addresses import tcp
from distbelief.control.credentials import KeyAuthority
from distbelief.control.messages import HostLost
from distbelief.control.sockets import host_of
from distbelief.coordinator.client import ask, whereabouts
from distbelief.coordinator.journal import read as read_journal
from distbelief.errors import DistBeliefError
from distbelief.launch.launch import Invitation, Launch
from distbelief.launch.lead import lead
from distbelief.launch.pollloop import Signals
from distbelief.steadyclock import CLOCK, SteadyClock


class CoordinatorActor:
    """Ray runs its calls concurrently, each in a thread."""

    def __init__(self, launch: Launch, authority: KeyAuthority, word: str) -> None:
        """`word`: see `shown`."""
        self._launch = launch
        self._authority = authority
        self._word = word
        self._signals = Signals()
        self._over = False
        self._invited = threading.Event()
        self._invitation: Invitation | None = None

    def lead(self) -> dict[str, Any]:
        """Run to the end; as `lead` does, it returns the journal's last record or raises."""
        try:
            if not sees(self._launch.run_dir, self._word):
                raise DistBeliefError(
                    f"the head node of the Ray cluster does not see the run directory {self._launch.run_dir}",
                    hint="give a --run-dir on a folder that all nodes share",
                )
            return lead(self._here(), _Silent(), self._announce, authority=self._authority, signals=self._signals)
        finally:
            self._over = True
            self._invited.set()

    def _here(self) -> Launch:
        """The launch with this node's address, where the coordinator listens."""
        import ray

        address = str(ray.util.get_node_ip_address())
        launch = self._launch.placed(listen=tcp(address))
        if not ray.get_runtime_context().was_current_actor_reconstructed:
            return launch
        continue_clock(launch.run_dir)
        before = _left_behind(launch.run_dir)
        listen = before if host_of(before) == address else launch.placement.listen
        return replace(launch.placed(listen=listen), resumed=False)

    def _announce(self, address: str, authority: KeyAuthority) -> None:
        self._invitation = Invitation(address, authority.run)  # agents need no more than this run's secret
        self._invited.set()

    def invitation(self) -> Invitation | None:
        """The invitation for the agents. None: the run was over before there was one."""
        self._invited.wait()
        return self._invitation

    def lost(self, host: str, reason: str) -> None:
        """The driver reports that an agent is gone. If no coordinator runs now, the next one notices the silence."""
        with contextlib.suppress(DistBeliefError):
            ask(self._launch.run_dir, HostLost(host, reason))

    def stop(self, number: int, count: int) -> None:
        """The driver has received `count` signals. It repeats the call, because this actor may have been restarted."""
        if not self._over:
            self._signals.take(number, count)


class _Silent:
    """Shows nothing: the driver reads the run directory and shows the progress."""

    def started(self, run_dir: Path, workers: int) -> None: ...

    def log(self, source: str, line: str) -> None: ...

    def refresh(self) -> None: ...


def continue_clock(run_dir: Path, clock: SteadyClock = CLOCK) -> None:
    """Show no time before the last record's: this process has read the machine's clock anew, and that may have been set
    back since the run began."""
    path = run_dir / "journal.jsonl"
    records = read_journal(path) if path.exists() else []
    behind_s = max((float(record.get("at", 0.0)) for record in records), default=0.0) - clock.now()
    if behind_s > 0:
        clock.continue_from(clock.offset_s + behind_s)


def _left_behind(run_dir: Path) -> str:
    """The address of the previous coordinator, from the file that a killed coordinator leaves. Empty: use any port."""
    try:
        return whereabouts(run_dir)[0]
    except DistBeliefError:
        return ""


_FILE = ".seen-by-ray"


@contextlib.contextmanager
def shown(run_dir: Path) -> Iterator[str]:
    """Inside the `with` block a file in the run directory holds the word: a node that reads it sees the directory."""
    word = secrets.token_hex(8)
    path = run_dir / _FILE
    path.write_text(word)
    try:
        yield word
    finally:
        path.unlink(missing_ok=True)


def sees(run_dir: Path, word: str) -> bool:
    try:
        return (run_dir / _FILE).read_text() == word
    except OSError:
        return False
