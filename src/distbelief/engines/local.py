"""The embedded engine: a coordinator and N workers on this machine, started, watched and ended from this process.

It keeps the shared segments, merges the logs, tells the coordinator of exits, starts and kills workers on its word,
starts the coordinator again when it dies, and shows progress. One thread, one poll loop; whatever happens, leaving it
leaves no process and no segment behind.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import signal
import socket
import time
from typing import Any

import msgspec
import zmq

from distbelief.comm.keeper import SegmentKeeper
from distbelief.comm.memfd import receive_message
from distbelief.comm.messages import (
    SECRET_BYTES,
    EndRun,
    EngineAttached,
    Event,
    KillServer,
    KillWorker,
    ServerExited,
    StartServer,
    StartWorker,
    StopRequested,
    WorkerExited,
    decode_command,
    encode,
)
from distbelief.comm.network import dial, host_of
from distbelief.coordinator.saving import STOP_S
from distbelief.engines.guests import TEMPLATE, Guests
from distbelief.engines.launch import Launch, Observer
from distbelief.engines.processes import CoordinatorProcess, LogPipe, Zygote
from distbelief.engines.rundir import ended, verdict
from distbelief.engines.signals import Signals
from distbelief.engines.watching import Watching
from distbelief.errors import RunFailed
from distbelief.strategies import servers_of
from distbelief.worker.spec import WorkerSpec

REFRESH_S = 0.2
HASTE_S = 0.3
GRACE_S = 3.0  # how long processes may take to end by themselves
ATTACH_EVERY_S = 1.0
SILENT_S = 10.0  # a coordinator that does not answer for so long is ended, and another one takes over
SHORT_LIFE_S = 2.0  # a coordinator that ends by itself so soon would do so again
MOST_SHORT_LIVES = 5


def run(launch: Launch, observer: Observer) -> dict[str, Any]:
    """Run to the end. Returns the journal's last record; raises when the run did not complete."""
    with Signals() as signals, _Run(launch, observer, signals) as local:
        observer.started(launch.run_dir, launch.workers)
        local.start()
        local.loop()
    return verdict(launch.run_dir, signals)


class _Run:
    """One run's processes, sockets and segments."""

    def __init__(self, launch: Launch, observer: Observer, signals: Signals) -> None:
        self._launch = launch
        self._observer = observer
        self._signals = signals
        self._stack = contextlib.ExitStack()
        self._watching = Watching()
        self._can_fork = False
        self._wanted: list[int] = []
        """Workers that we were asked to start before we could."""
        self._workers: dict[int, int] = {}  # process number -> worker
        self._alive: set[int] = set()
        self._exits: dict[int, int] = {}  # worker -> status
        self._servers: dict[int, int] = {}  # process number -> parameter server
        self._servers_alive: set[int] = set()
        self._server_exits: dict[int, int] = {}
        self._servers_wanted: list[int] = []
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._store: tuple[str, int] | None = None
        self._epoch = 0
        self._answered_at = time.monotonic()
        self._short_lives = 0
        self._ended = False
        self._deadline = float("inf")

    def __enter__(self) -> _Run:
        return self

    def start(self) -> None:
        """Coordinator and zygote start side by side: importing torch is the longest part of a launch."""
        launch = self._launch
        self._keeper = SegmentKeeper()
        self._stack.callback(self._keeper.close)
        if launch.job_pickle:
            self._keeper.put("job", launch.job_pickle)
        self._zygote = Zygote(self._log("zygote"), self._launch.strategy)
        self._stack.callback(self._zygote.close)
        self._order = {
            "run_dir": str(launch.run_dir),
            "secret": self._secret.hex(),
            "config": launch.run_config(),
            "listen": launch.listen,
            "resume": launch.strategy if launch.resumed else "",
        }
        self._start_coordinator()
        self._address = self._order["listen"] = self._coordinator.address()  # a later one listens there too
        self._order["resume"] = ""  # once
        self._connect(self._address)
        self._watching.watch(self._zygote.socket, self._zygote_ready)
        self._watching.watch(self._signals.wake_fd, self._stop)
        self._guests = Guests(launch.run_dir, self._secret)
        self._stack.callback(self._guests.close)
        self._watching.watch(self._guests.listener, self._guest_arrives)

    def _start_coordinator(self) -> None:
        self._coordinator = CoordinatorProcess(self._order, self._log("coordinator"))
        self._stack.callback(self._coordinator.close)

    def _connect(self, address: str) -> None:
        context = self._stack.enter_context(zmq.Context())
        self._socket = self._stack.enter_context(context.socket(zmq.DEALER))
        self._socket.setsockopt(zmq.LINGER, 0)
        dial(self._socket, address, self._secret)
        self._watching.watch(self._socket, self._commands)
        self._attach()

    def _attach(self) -> None:
        """Tell all there is to know. Repeated, so that what was lost, on the way or with a coordinator, is mended."""
        self._next_attach = time.monotonic() + ATTACH_EVERY_S
        running = {self._workers[pid]: pid for pid in self._alive}
        servers = {self._servers[pid]: pid for pid in self._servers_alive}
        self._send(EngineAttached(host_name(), running, self._exits, servers, self._server_exits))
        if self._signals.count:
            self._ask_to_stop()

    def _zygote_ready(self) -> None:
        self._zygote.wait_ready()
        self._can_fork = True
        self._watching.watch(self._zygote.socket, self._zygote_event)
        if self._launch.usable_transport == "gloo":
            host = host_of(self._address)
            self._store = (host, self._zygote.fork_store(host, self._log("store")))
        self._write_template()
        first = () if self._launch.resumed else range(self._launch.workers)
        for worker in dict.fromkeys([*first, *self._wanted]):  # the coordinator may have grown impatient: each one once
            self._start_worker(worker)
        count = 0 if self._launch.resumed else servers_of(self._launch.strategy)
        for server in dict.fromkeys([*range(count), *self._servers_wanted]):
            self._start_server(server)

    def _write_template(self) -> None:
        """What a worker on another host needs to know, for whoever may read the run directory's private files."""
        path = self._launch.run_dir / TEMPLATE
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(self._spec(-1)))
        self._stack.callback(path.unlink, missing_ok=True)

    def _spec(self, worker: int) -> WorkerSpec:
        return self._launch.worker_spec(worker, host_name(), self._address, self._secret.hex(), self._store)

    def _start_worker(self, worker: int) -> None:
        pid, connection = self._zygote.fork_worker(self._spec(worker), self._log(f"worker {worker}"))
        self._adopt(worker, pid, connection)

    def _start_server(self, server: int) -> None:
        pid, connection = self._zygote.fork_server(self._spec(server), self._log(f"server {server}"))
        self._servers[pid] = server
        self._servers_alive.add(pid)
        self._stack.callback(connection.close)
        self._watching.watch(connection, lambda: self._segment_request(connection))

    def _guest_arrives(self) -> None:
        """A worker that somebody has started by hand, with a number that the coordinator gave it."""
        guest = self._guests.accept(self._spec)
        if guest is None:
            return
        self._adopt(guest.worker, guest.pid, guest.connection)

        def left() -> None:
            self._watching.unwatch(guest.pidfd)
            self._exited({"event": "exited", "pid": guest.pid, "status": self._guests.departed(guest)})

        self._watching.watch(guest.pidfd, left)

    def _adopt(self, worker: int, pid: int, connection: socket.socket) -> None:
        self._workers[pid] = worker
        self._alive.add(pid)
        self._stack.callback(connection.close)
        self._watching.watch(connection, lambda: self._segment_request(connection))

    def loop(self) -> None:
        """Serve until the coordinator has ended the run and every process is gone."""
        next_refresh = 0.0
        while not (self._ended and not self._alive and not self._servers_alive):
            self._watching.serve(REFRESH_S)
            for event in self._zygote.early_exits:
                self._exited(event)
            self._zygote.early_exits.clear()
            now = time.monotonic()
            if now >= next_refresh:
                next_refresh = now + REFRESH_S
                self._observer.refresh()
            if now >= self._next_attach and not self._ended:
                self._attach()
            if now - self._answered_at > SILENT_S and not self._ended:
                self._answered_at = now
                self._coordinator.kill()
            if self._coordinator.ended() and not self._ended:
                self._coordinator_ended()
            if now >= self._deadline:
                self._deadline = float("inf")
                self._finish(GRACE_S / 2)
                for pid in [*self._alive, *self._servers_alive]:
                    self._end_by_force(pid)

    # --- what happens ------------------------------------------------------------------------------------------------

    def _commands(self) -> None:
        while self._socket.poll(0):
            self._answered_at = time.monotonic()
            command = decode_command(self._socket.recv_multipart()[-1])
            match command:
                case EndRun():
                    # After a failure nobody has anything left to do, and a worker that still loads hears nothing.
                    self._finish(GRACE_S if command.status == "completed" else HASTE_S)
                case StartWorker():
                    self._start_another(command)
                case KillWorker():
                    self._kill(command)
                case StartServer(server=server) if self._obeyed(command.epoch):
                    self._start_another_server(server)
                case KillServer(server=server) if self._obeyed(command.epoch):
                    for pid in [pid for pid in self._servers_alive if self._servers[pid] == server]:
                        self._end_by_force(pid)

    def _start_another(self, command: StartWorker) -> None:
        if not self._obeyed(command.epoch) or self._ended or command.worker in self._workers.values():
            return
        if self._can_fork:
            self._start_worker(command.worker)
        elif command.worker not in self._wanted:
            self._wanted.append(command.worker)

    def _start_another_server(self, server: int) -> None:
        if self._ended or server in self._servers.values():
            return
        if self._can_fork:
            self._start_server(server)
        elif server not in self._servers_wanted:
            self._servers_wanted.append(server)

    def _kill(self, command: KillWorker) -> None:
        if self._obeyed(command.epoch):
            for pid in [pid for pid in self._alive if self._workers[pid] == command.worker]:
                self._end_by_force(pid)

    def _end_by_force(self, pid: int) -> None:
        if not self._guests.kill(pid):
            self._zygote.kill(pid)

    def _obeyed(self, epoch: int) -> bool:
        """No command of an older coordinator is carried out."""
        self._epoch = max(self._epoch, epoch)
        return epoch == self._epoch

    def _coordinator_ended(self) -> None:
        """It has ended the run, or it has died: then another one takes the run over from the journal."""
        self._commands()  # its last words may still be in the socket
        if self._ended:
            return
        if ended(self._launch.run_dir):
            self._finish()  # the end is on the disk: nobody needs to be told but our own workers, and they are ended
            return
        lived_s = time.monotonic() - self._coordinator.started_at
        if not self._coordinator.was_killed:
            self._short_lives = self._short_lives + 1 if lived_s < SHORT_LIFE_S else 0
        if self._short_lives >= MOST_SHORT_LIVES:
            self._finish(HASTE_S)
            raise RunFailed(
                f"the coordinator died {self._short_lives} times within seconds",
                hint=f"see {self._launch.run_dir}/logs/coordinator.log",
            )
        self._coordinator.close()
        self._start_coordinator()
        self._answered_at = time.monotonic()
        self._attach()  # it waits in the socket until there is somebody to read it

    def _finish(self, grace_s: float = GRACE_S) -> None:
        self._ended = True
        self._deadline = min(self._deadline, time.monotonic() + grace_s)

    def _stop(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._signals.wake_fd)
        self._ask_to_stop()
        grace_s = GRACE_S if self._signals.count == 1 else 0.0
        if grace_s and self._launch.save_plan:  # the coordinator ends the run when a checkpoint is there, or sooner
            grace_s += 10 * STOP_S
        until = time.monotonic() + grace_s
        self._deadline = min(self._deadline, until) if self._ended else until

    def _ask_to_stop(self) -> None:
        name = signal.Signals(self._signals.received).name
        self._send(StopRequested(f"{name} received", at_once=self._signals.count > 1))

    def _zygote_event(self) -> None:
        try:
            event, _ = receive_message(self._zygote.socket)
        except EOFError:
            self._can_fork = False
            self._watching.unwatch(self._zygote.socket)
            self._alive.clear()  # workers die with the zygote; guests are told of the end
            self._servers_alive.clear()
            self._send(StopRequested("the process that starts workers has died", at_once=True))
            self._finish(0.5)
            return
        self._exited(event)

    def _exited(self, event: dict[str, Any]) -> None:
        pid = int(event.get("pid", -1))
        if event.get("event") == "exited" and pid in self._servers_alive:
            self._servers_alive.discard(pid)
            server = self._servers[pid]
            self._server_exits[server] = int(event["status"])
            self._keeper.drop_all(f"server {server}/")
            self._send(ServerExited(server, self._server_exits[server]))
        elif event.get("event") == "exited" and pid in self._alive:
            self._alive.discard(pid)
            worker = self._workers[pid]
            self._exits[worker] = int(event["status"])
            self._send(WorkerExited(worker, self._exits[worker]))

    def _segment_request(self, connection: socket.socket) -> None:
        try:
            self._keeper.answer(connection)
        except (EOFError, ConnectionError):
            self._watching.unwatch(connection)
            connection.close()

    def _send(self, event: Event) -> None:
        with contextlib.suppress(zmq.Again):  # nobody has read for long; all of it is said again and again
            self._socket.send_multipart([self._secret, encode(event)], zmq.NOBLOCK)

    # --- plumbing ----------------------------------------------------------------------------------------------------

    def _log(self, source: str) -> LogPipe:
        log = LogPipe(source, self._launch.run_dir / "logs" / f"{source.replace(' ', '-')}.log", self._observer.log)
        self._stack.callback(log.close)

        def pump() -> None:
            if not log.pump():
                self._watching.unwatch(log.read_fd)
                log.close()

        self._watching.watch(log.read_fd, pump)
        return log

    def __exit__(self, *_: object) -> None:
        """Every process we started is gone when this returns, also after an exception."""
        self._stack.close()
        self._observer.refresh()


def host_name() -> str:
    return platform.node() or "localhost"
