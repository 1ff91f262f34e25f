"""The embedded engine: a coordinator and N workers on this machine, started, watched and ended from this process.

Workers and servers are `hosting.py`'s. This starts the coordinator, and another one when it dies, carries out its
commands, tells it of exits, merges the logs and shows progress. One thread, one poll loop; whatever happens, leaving it
leaves no process and no segment behind.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from pathlib import Path
from typing import Any

import zmq

from distbelief.comm.badges import Authority
from distbelief.comm.keys import read_key, run_secret
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
from distbelief.comm.network import dial
from distbelief.coordinator.saving import STOP_S
from distbelief.engines.hosting import Hosting, Role, host_name
from distbelief.engines.launch import Launch, Observer
from distbelief.engines.processes import CoordinatorProcess, LogPipe
from distbelief.engines.rundir import ended, verdict
from distbelief.engines.signals import Signals
from distbelief.engines.watching import Watching
from distbelief.errors import RunFailed
from distbelief.strategies import servers_of

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
    """One run's coordinator, and what it commands here. See also `hosting.Told`."""

    def __init__(self, launch: Launch, observer: Observer, signals: Signals) -> None:
        self._launch = launch
        self._observer = observer
        self._signals = signals
        self._stack = contextlib.ExitStack()
        self._watching = Watching()
        self._authority = _authority(launch)
        self._badge = self._authority.owner()
        self._signer = self._badge.signer()
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
        self._hosting = Hosting(launch, self._authority, self._watching, self)
        self._stack.callback(self._hosting.close)
        self._order = {
            "run_dir": str(launch.run_dir),
            "secret": self._authority.secret.hex(),
            "start": self._authority.start,
            "config": launch.run_config(),
            "listen": launch.listen,
            "resume": launch.strategy if launch.resumed else "",
        }
        self._start_coordinator()
        address = self._order["listen"] = self._coordinator.address()  # a later one listens there too
        self._order["resume"] = ""  # once
        self._connect(address)
        self._watching.watch(self._signals.wake_fd, self._stop)
        self._hosting.begin(address)
        if not launch.resumed:  # then the journal knows who is to be there
            for worker in range(launch.workers):
                self._hosting.start("worker", worker)
            for server in range(servers_of(launch.strategy)):
                self._hosting.start("server", server)

    def _start_coordinator(self) -> None:
        self._coordinator = CoordinatorProcess(self._order, self.log("coordinator"))
        self._stack.callback(self._coordinator.close)

    def _connect(self, address: str) -> None:
        context = self._stack.enter_context(zmq.Context())
        self._socket = self._stack.enter_context(context.socket(zmq.DEALER))
        self._socket.setsockopt(zmq.LINGER, 0)
        dial(self._socket, address, self._badge.door)
        self._watching.watch(self._socket, self._commands)
        self._attach()

    def _attach(self) -> None:
        """Tell all there is to know. Repeated, so that what was lost, on the way or with a coordinator, is mended."""
        self._next_attach = time.monotonic() + ATTACH_EVERY_S
        there = self._hosting
        workers, servers = there.running("worker"), there.running("server")
        self._send(EngineAttached(host_name(), workers, there.exits("worker"), servers, there.exits("server")))
        if self._signals.count:
            self._ask_to_stop()

    def loop(self) -> None:
        """Serve until the coordinator has ended the run and every process is gone."""
        next_refresh = 0.0
        while not (self._ended and self._hosting.is_empty):
            self._watching.serve(REFRESH_S)
            self._hosting.collect()
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
                self._hosting.kill_all()

    # --- what happens ------------------------------------------------------------------------------------------------

    def _commands(self) -> None:
        while self._socket.poll(0):
            self._answered_at = time.monotonic()
            command = decode_command(self._socket.recv_multipart()[-1])
            if isinstance(command, EndRun):
                # After a failure nobody has anything left to do, and a worker that still loads hears nothing.
                self._finish(GRACE_S if command.status == "completed" else HASTE_S)
                continue
            self._epoch = max(self._epoch, command.epoch)
            if command.epoch < self._epoch:
                continue  # no command of an older coordinator is carried out
            match command:
                case StartWorker() if not self._ended:
                    self._hosting.start("worker", command.worker)
                case StartServer() if not self._ended:
                    self._hosting.start("server", command.server)
                case KillWorker():
                    self._hosting.kill("worker", command.worker)
                case KillServer():
                    self._hosting.kill("server", command.server)

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

    def exited(self, role: Role, number: int, status: int) -> None:
        self._send(WorkerExited(number, status) if role == "worker" else ServerExited(number, status))

    def cannot_host(self) -> None:
        self._send(StopRequested("the process that starts workers has died", at_once=True))
        self._finish(0.5)

    def _send(self, event: Event) -> None:
        message = encode(event)
        with contextlib.suppress(zmq.Again):  # nobody has read for long; all of it is said again and again
            self._socket.send_multipart([self._signer.seal(message), message], zmq.NOBLOCK)

    # --- plumbing ----------------------------------------------------------------------------------------------------

    def log(self, source: str) -> LogPipe:
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


def _authority(launch: Launch) -> Authority:
    """By the key, or a secret of this run alone: whoever may read the run directory can join with it."""
    secret = run_secret(read_key(Path(launch.key_file))) if launch.key_file else secrets.token_bytes(SECRET_BYTES)
    return Authority(secret, start=secrets.token_hex(8))
