"""The driver of a run on Ray: it places agents, shows progress, and ends every actor and placement group of the run.

Ray restarts the coordinator's actor by itself. The driver replaces agents: if an agent is gone, with its node or alone,
the driver looks for room elsewhere, now or when a node comes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from distbelief.coordinator.journal import JournalTail
from distbelief.coordinator.rules.saving import STOP_S
from distbelief.errors import DistBeliefError, RunFailed, RunInterrupted
from distbelief.launch.growing import Logs
from distbelief.launch.launch import Invitation, Launch, Observer
from distbelief.launch.lead import authority_of
from distbelief.launch.pollloop import Signals
from distbelief.launch.ray import cluster
from distbelief.launch.ray.agents import Agents, Demand
from distbelief.launch.ray.coordinator import CoordinatorActor, shown
from distbelief.launch.ray.rules import places
from distbelief.launch.ray.rules.places import Need, Place
from distbelief.launch.rundir import verdict

REFRESH_S = 0.2
LOOK_EVERY_S = 1.0
GRACE_S = 5.0
"""How long agents and coordinator may take to end by themselves."""
SAY_AGAIN_S = 30.0
DOUBT_S = 20.0
"""Ray finds out within this time that a node is dead."""


def run(launch: Launch, observer: Observer) -> dict[str, Any]:
    """Run to the end. Returns the journal's last record; raises when the run did not complete."""
    need = Need(launch.options.threads, 1 if launch.options.device.startswith("cuda") else 0)
    # Ray installs its own handler of SIGTERM when it is initialised, so ours is installed after it.
    with (
        cluster.connected(launch.placement.on, need.cpus * launch.options.workers) as is_ours,
        Signals() as signals,
        quiet(launch.run_dir / "logs" / "ray.log"),
        shown(launch.run_dir) as word,
        _Driver(launch, observer, signals, need, word) as driver,
    ):
        observer.started(launch.run_dir, launch.options.workers)
        if is_ours:
            observer.log("ray", "started a Ray cluster on this machine for this run")
        elif clear := launch.placed(listen="tcp://0.0.0.0:*").in_the_clear:
            observer.log("security", clear)
        if launch.not_rechecked:
            observer.log("recheck", launch.not_rechecked)
        return driver.run()


class _Driver:
    def __init__(self, launch: Launch, observer: Observer, signals: Signals, need: Need, word: str) -> None:
        # Never the user's key: the actors' arguments travel through Ray, and it opens other runs.
        placed = launch.placed(local_workers=0, room=0, host="coordinator", is_open=True, key_file="")
        self._launch = replace(placed, run_dir=launch.run_dir.resolve())
        self._observer = observer
        self._signals = signals
        self._need = need
        self._word = word
        self._name = launch.run_dir.resolve().name
        self._agents = Agents(self._name, need)
        self._demand = Demand(need)
        self._logs = Logs(launch.run_dir, without=("ray",))  # what Ray itself prints, see quiet()
        self._target = Target(launch.run_dir, launch.options.workers)
        self._unusable: set[str] = set()
        self._doubtful: dict[str, float] = {}
        """Nodes that may be dead -> when Ray will know."""
        self._next_look = 0.0
        self._forced_at = float("inf")
        self._coordinator: Any = None

    def __enter__(self) -> _Driver:
        return self

    def run(self) -> dict[str, Any]:
        first = self._wait_for_places()
        if first:
            self._lead()
            invitation = self._invitation()
            if invitation:
                self._invited = invitation
                self._agents.start(first, invitation)
            self._watch()
        return self._outcome()

    # --- the start ---------------------------------------------------------------------------------------------------

    def _wait_for_places(self) -> list[Place]:
        """Places for all workers; nothing is reserved before all have room. Empty: a signal came first."""
        wanted, said_at = self._launch.options.workers, 0.0
        while not self._signals.count:
            nodes = cluster.nodes(self._agents.nodes)
            shortage = places.shortage(nodes, self._need, wanted)
            if shortage and not cluster.grows():
                fitting = sum(node.capacity(self._need) for node in nodes)
                fewer = f"give --workers {fitting}, or " if fitting else ""
                raise DistBeliefError(shortage, hint=f"{fewer}add nodes with `ray start --address=…`")
            found = places.apart(places.place(nodes, self._need, wanted), self._need)
            if sum(place.workers for place in found) == wanted:
                self._demand.withdraw()
                if self._agents.reserve(found):
                    return found
            elif time.monotonic() - said_at > SAY_AGAIN_S:
                said_at = time.monotonic()
                room = places.room(nodes, self._need)
                what = shortage or f"other jobs have taken CPUs: there is room for {room} of {wanted} workers"
                self._observer.log("ray", f"waiting: {what}")
                self._demand.make(wanted)
            self._demand.met()
            time.sleep(LOOK_EVERY_S)
        return []

    def _lead(self) -> None:
        import ray

        actor = ray.remote(CoordinatorActor).options(
            name=self._name,
            namespace=cluster.NAMESPACE,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=8,
            **cluster.on_head(),
        )
        try:
            # The driver makes the authority, so it stays the same when Ray restarts the actor.
            self._coordinator = actor.remote(self._launch, authority_of(self._launch), self._word)
        except ValueError as error:
            raise DistBeliefError(
                f"a run called {self._name} is running in this Ray cluster already", hint="give another --run-dir"
            ) from error
        self._over = self._coordinator.lead.remote()

    def _invitation(self) -> Invitation | None:
        import ray

        promised = self._coordinator.invitation.remote()
        while not ray.wait([promised], timeout=REFRESH_S)[0]:
            self._refresh()
            self._forward_signals()
            if time.monotonic() > self._forced_at:
                return None
        found: Invitation | None = ray.get(promised)
        return found

    # --- while it runs -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        import ray

        while not ray.wait([self._over], timeout=REFRESH_S)[0]:
            self._refresh()
            self._forward_signals()
            now = time.monotonic()
            if now > self._forced_at:
                return
            if now >= self._next_look:
                self._next_look = now + LOOK_EVERY_S
                self._look()

    def _refresh(self) -> None:
        for source, line in self._logs.lines():
            self._observer.log(source, line)
        self._observer.refresh()

    def _forward_signals(self) -> None:
        """Forward this process's signals to the coordinator, repeatedly, because its actor may have been restarted."""
        if not self._signals.count:
            return
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._signals.wake_fd)
        self._coordinator.stop.remote(self._signals.received, self._signals.count)
        grace_s = GRACE_S if self._signals.count > 1 or not self._launch.options.saves else GRACE_S + 10 * STOP_S
        self._forced_at = min(self._forced_at, time.monotonic() + grace_s)

    def _look(self) -> None:
        """Keep room for as many workers as the run is to have: replace agents that are gone, and ask for nodes."""
        wanted, ended = self._target.read()
        if ended or self._signals.count:
            return
        for gone in self._agents.collect():
            if gone.refused:
                self._unusable.add(gone.node)
                self._observer.log("ray", f"{gone.host} takes no part: {gone.reason}")
            else:
                self._coordinator.lost.remote(gone.host, gone.reason)
                if not gone.is_certain:
                    self._doubtful[gone.node] = time.monotonic() + DOUBT_S
        missing = wanted - self._agents.workers
        if missing <= 0:
            self._demand.withdraw()
            return
        if self._demand.met():
            return  # the room that was reserved for the demand is free in the next round
        self._doubtful = {node: until for node, until in self._doubtful.items() if until > time.monotonic()}
        without = self._unusable | self._doubtful.keys()
        nodes = [node for node in cluster.nodes(self._agents.nodes) if node.id not in without]
        found = places.apart(places.place(nodes, self._need, missing), self._need)
        if found and self._agents.reserve(found):
            for place in found:
                workers = "1 worker" if place.workers == 1 else f"{place.workers} workers"
                self._observer.log("ray", f"an agent for {workers} is started on {place.name}")
            self._agents.start(found, self._invited)
        elif not self._agents.workers and self._nobody_can():
            raise RunFailed(
                "no node of the Ray cluster can take part", hint="the lines above say why; see also docs/ray.md"
            )
        elif self._demand.make(missing):
            workers = f"{missing} of {wanted} workers"
            self._observer.log("ray", f"there is no room for {workers}; they are started when a node joins")

    def _nobody_can(self) -> bool:
        """Whether every node with room has refused to take part."""
        able = {node.id for node in cluster.nodes(self._agents.nodes) if node.capacity(self._need)}
        return bool(able) and able <= self._unusable

    # --- the end -----------------------------------------------------------------------------------------------------

    def _outcome(self) -> dict[str, Any]:
        import ray

        if self._coordinator is None:
            error = RunInterrupted("stopped before there was room for the run; nothing was started")
            error.exit_code = 128 + self._signals.received
            raise error
        if not ray.wait([self._over], timeout=0)[0]:
            return verdict(self._launch.run_dir, self._signals)  # a signal came, and they did not end by themselves
        try:
            record: dict[str, Any] = ray.get(self._over)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, DistBeliefError):
                raise error.cause from None
            raise
        except ray.exceptions.RayError as error:
            raise RunFailed(f"the coordinator's actor is gone: {error}", hint="see Ray's own logs") from error
        self._agents.wait(GRACE_S)
        return record

    def __exit__(self, *_: object) -> None:
        """Removes every actor and placement group of the run, also after an exception."""
        import ray

        self._demand.withdraw()
        self._agents.close()
        if self._coordinator is not None:
            ray.kill(self._coordinator)
        self._refresh()


# --- how many workers are wanted --------------------------------------------------------------------------------------


class Target:
    """The wanted number of workers: as at the start, until `distbelief scale` changes it in the journal."""

    def __init__(self, run_dir: Path, workers: int) -> None:
        self._journal = JournalTail(run_dir / "journal.jsonl")
        self._workers = self._at_start = workers
        self._ended = False

    def read(self) -> tuple[int, bool]:
        """(workers, whether the run has ended)"""
        news = self._journal.read()
        if self._journal.is_void:
            self._workers, self._ended = self._at_start, False
        for record in news:
            if record.get("kind") == "scaled":
                self._workers = int(record["target"])
            if record.get("kind") in ("ended", "resumed"):
                self._ended = record["kind"] == "ended"
        return self._workers, self._ended


# --- what Ray prints --------------------------------------------------------------------------------------------------


_THREAD = "ray_listen_error_messages"


@contextlib.contextmanager
def quiet(path: Path) -> Iterator[None]:
    """Inside the `with` block, send what Ray's own thread prints to this file. At every death Ray prints pages of its
    own state from that thread, and has no switch for it."""
    with (
        path.open("a", buffering=1, errors="replace") as file,
        contextlib.redirect_stdout(_SplitStream(sys.stdout, file)),
    ):
        yield


class _SplitStream:
    """The stream as before for all threads but Ray's."""

    def __init__(self, usual: TextIO, file: TextIO) -> None:
        self._usual = usual
        self._file = file

    def write(self, text: str) -> int:
        return self._chosen().write(text)

    def flush(self) -> None:
        self._chosen().flush()

    def _chosen(self) -> TextIO:
        return self._file if threading.current_thread().name == _THREAD else self._usual

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)
