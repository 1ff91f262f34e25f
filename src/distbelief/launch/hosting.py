"""The workers and parameter servers of a run on this machine: started, watched, given shared memory, and ended.

The zygote forks them; a user may also start workers by hand. The coordinator decides, and `Hosting` carries out.
Workers and servers are numbered separately. Closing a `Hosting` leaves no process and no shared-memory segment behind.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from distbelief.control.credentials import Authority
from distbelief.control.messages import STATUS_NOT_STARTED
from distbelief.control.sockets import host_of
from distbelief.errors import RunFailed
from distbelief.launch import parcel
from distbelief.launch.launch import Launch
from distbelief.launch.manualworkers import ManualWorkers
from distbelief.launch.pollloop import PollLoop, signals_blocked
from distbelief.launch.processes import LogPipe, NotStarted, Zygote
from distbelief.launch.rules.restarting import ShortLives
from distbelief.transport.shm.memfd import receive_message
from distbelief.transport.shm.segmentserver import SegmentServer
from distbelief.worker.spec import WorkerSpec

Role = Literal["worker", "server"]
Member = tuple[Role, int]


@dataclass(frozen=True)
class StoreAddress:
    """Where torch's rendezvous store listens; None: the run needs no store."""

    at: tuple[str, int] | None = None


class HostingObserver(Protocol):
    """The owner of a `Hosting`, which receives its reports: the agent of the host."""

    def log(self, source: str) -> LogPipe:
        """A log for the output of a process."""

    def exited(self, role: Role, number: int, status: int, reason: str = "") -> None: ...

    def cannot_host(self) -> None:
        """The zygote has died, and with it every member that it had forked. Their exits were reported before."""


class Hosting:
    def __init__(
        self,
        launch: Launch,
        host: str,
        authority: Authority,
        poll: PollLoop,
        observer: HostingObserver,
        elsewhere: StoreAddress | None = None,
    ) -> None:
        """`elsewhere`: where torch's rendezvous store is, on another host. None: this host leads and has it."""
        self._launch = launch
        self._host = host
        self._leads = elsewhere is None
        self._authority = authority
        self._poll = poll
        self._observer = observer
        self._stack = contextlib.ExitStack()
        self._can_fork = False
        self._wanted: list[Member] = []
        """Members that are to be started as soon as the zygote is ready."""
        self._members: dict[int, Member] = {}  # by process number
        self._places: dict[int, int] = {}
        """Worker -> its index on this host, by which it chooses an accelerator."""
        self._alive: set[int] = set()
        self._exits: dict[Member, int] = {}
        self._address = ""
        self._manual: ManualWorkers | None = None
        self._store = elsewhere.at if elsewhere else None
        self._store_pid = -1
        self._store_started_at = 0.0
        self._store_lives = ShortLives()
        self._segments = SegmentServer()
        self._stack.callback(self._segments.close)
        if launch.job.pickled:
            self._segments.put("job", launch.job.pickled)
        with signals_blocked(launch.placement.blocks_signals):
            self._zygote = Zygote(observer.log("zygote"), launch.options.strategy)
        self._stack.callback(self._zygote.close)

    def begin(self, address: str) -> None:
        """The coordinator listens at this address: members can be started once the zygote is ready."""
        self._address = address
        self._poll.watch(self._zygote.socket, self._zygote_ready)
        if self._leads:
            self._manual = ManualWorkers(self._launch.run_dir, self._authority.secret)
            self._stack.callback(self._manual.close)
            self._poll.watch(self._manual.listener, self._manual_worker_arrives)

    def _zygote_ready(self) -> None:
        self._zygote.wait_ready()
        self._can_fork = True
        self._poll.watch(self._zygote.socket, self._zygote_event)
        if self._leads and self._launch.needs_store:
            host = host_of(self._address)
            # If Ray restarts the launching process, members of the previous one look for the store at its old port.
            before = parcel.store_left_behind(self._launch.run_dir)
            self._start_store(host, before[1] if before and before[0] == host else 0, self._observer.log("store"))
        if self._leads and self._launch.takes_hosts:
            self._stack.callback(parcel.write(self._launch, self._authority.start, self._store).unlink, missing_ok=True)
        wanted, self._wanted = self._wanted, []
        for role, number in wanted:
            self._fork(role, number)

    def _start_store(self, host: str, port: int, log: LogPipe) -> None:
        self._store_started_at = time.monotonic()
        credentials = self._authority.server(-1)  # a server without slices
        self._store_pid, port = self._zygote.fork_store(host, port, credentials, log)
        self._store = (host, port)

    def _store_died(self, status: int) -> None:
        """Start another rendezvous server at the same address, which is all that members know of it. Its keys are lost:
        members whose group is not complete notice that, and connect again (rendezvousserver.py)."""
        assert self._store is not None
        host, port = self._store
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        lived_s = time.monotonic() - self._store_started_at
        if self._store_lives.died(lived_s, status == -signal.SIGKILL):
            raise RunFailed(
                f"the rendezvous server of torch's groups died {self._store_lives.count} times within seconds; "
                f"the last one {how}",
                hint=f"see {self._launch.run_dir}/logs/store.log",
            )
        log = self._observer.log("store")
        os.write(log.write_fd, f"the rendezvous server {how}; another one takes its place\n".encode())
        self._start_store(host, port, log)
        if self._store != (host, port):
            raise RunFailed(
                f"the rendezvous server of torch's groups {how}, and another process has taken its port {port}",
                hint=f"go on with `distbelief resume {shlex.quote(str(self._launch.run_dir))}`",
            )

    def _spec(self, role: Role, number: int) -> WorkerSpec:
        credential = self._authority.worker(number) if role == "worker" else self._authority.server(number)
        place = self._place(number) if role == "worker" else 0
        return self._launch.worker_spec(number, self._host, self._address, credential, self._store, place)

    def _place(self, worker: int) -> int:
        """The smallest index that no other worker of this host has."""
        taken = {place for number, place in self._places.items() if number in self.running("worker")}
        self._places[worker] = next(place for place in itertools.count() if place not in taken)
        return self._places[worker]

    # --- commands ----------------------------------------------------------------------------------------------------

    def start(self, role: Role, number: int) -> None:
        """Start a member, once: the coordinator may repeat the command."""
        if (role, number) in self._members.values() or (role, number) in (*self._wanted, *self._exits):
            return
        if self._can_fork:
            self._fork(role, number)
        else:
            self._wanted.append((role, number))

    def kill(self, role: Role, number: int) -> None:
        for pid in [pid for pid in self._alive if self._members[pid] == (role, number)]:
            self._end_by_force(pid)

    def cancel(self) -> None:
        """Forget the members that wait for the zygote."""
        self._wanted.clear()

    def kill_all(self) -> None:
        for pid in list(self._alive):
            self._end_by_force(pid)

    def _fork(self, role: Role, number: int) -> None:
        fork = self._zygote.fork_worker if role == "worker" else self._zygote.fork_server
        try:
            pid, connection = fork(self._spec(role, number), self._observer.log(f"{role} {number}"))
        except NotStarted as error:
            self._exits[role, number] = STATUS_NOT_STARTED
            self._observer.exited(role, number, STATUS_NOT_STARTED, error.message)
        else:
            self._adopt((role, number), pid, connection)

    def _adopt(self, member: Member, pid: int, connection: socket.socket) -> None:
        self._members[pid] = member
        self._alive.add(pid)
        self._stack.callback(connection.close)
        self._poll.watch(connection, lambda: self._segment_request(connection))

    def _end_by_force(self, pid: int) -> None:
        if self._manual is None or not self._manual.kill(pid):
            self._zygote.kill(pid)

    # --- observations ------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        return not self._alive

    @property
    def has_hosted(self) -> bool:
        return bool(self._exits)

    def running(self, role: Role) -> dict[int, int]:
        """Number -> process number; 0: the member waits for the zygote."""
        found = [(self._members[pid], pid) for pid in self._alive]
        found += [(member, 0) for member in self._wanted]
        return {number: pid for (of, number), pid in found if of == role}

    def exits(self, role: Role) -> dict[int, int]:
        """Number -> exit status of the members that have ended."""
        return {number: status for (of, number), status in self._exits.items() if of == role}

    def collect(self) -> None:
        """Handle exits that the zygote reported while a fork was pending."""
        early = list(self._zygote.early_exits)
        self._zygote.early_exits.clear()
        for event in early:
            self._exited(event)

    def _manual_worker_arrives(self) -> None:
        """A user has started a worker by hand; the coordinator has given it a number."""
        assert self._manual is not None
        worker = self._manual.accept(lambda number: self._spec("worker", number))
        if worker is None:
            return
        self._adopt(("worker", worker.worker), worker.pid, worker.connection)

        def left() -> None:
            self._poll.unwatch(worker.pidfd)
            assert self._manual is not None
            self._exited({"event": "exited", "pid": worker.pid, "status": self._manual.departed(worker)})

        self._poll.watch(worker.pidfd, left)

    def _zygote_event(self) -> None:
        try:
            event, _ = receive_message(self._zygote.socket)
        except EOFError:
            self._can_fork = False
            self._poll.unwatch(self._zygote.socket)
            for pid in list(
                self._alive
            ):  # forked members die with the zygote; manually started ones are told of the end of the run
                self._exited({"event": "exited", "pid": pid, "status": -signal.SIGKILL})
            self._observer.cannot_host()
            return
        self._exited(event)

    def _exited(self, event: dict[str, Any]) -> None:
        pid = int(event.get("pid", -1))
        if event.get("event") == "exited" and pid == self._store_pid:
            self._store_died(int(event["status"]))
        if event.get("event") != "exited" or pid not in self._alive:
            return
        self._alive.discard(pid)
        role, number = member = self._members[pid]
        self._exits[member] = int(event["status"])
        if role == "server":
            self._segments.drop_all(f"server {number}/")
        self._observer.exited(role, number, self._exits[member])

    def _segment_request(self, connection: socket.socket) -> None:
        try:
            self._segments.answer(connection)
        except (EOFError, OSError, ValueError, KeyError, TypeError):  # the process is gone, or is no worker of this run
            self._poll.unwatch(connection)
            connection.close()

    def close(self) -> None:
        """Ends every process that was started here."""
        self._stack.close()
