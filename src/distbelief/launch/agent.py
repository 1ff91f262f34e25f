"""The agent of a host: connected to the coordinator, it starts and ends members on command, and reports their state.

The process that leads the run has an agent for its own host (lead.py); every other host has one too (joining.py).
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from distbelief.control.credentials import Authority
from distbelief.control.messages import (
    LEADER_GONE,
    Command,
    EndRun,
    EngineAttached,
    Event,
    JoinAgain,
    KillServer,
    KillWorker,
    ServerExited,
    StartServer,
    StartWorker,
    WorkerExited,
    decode_command,
    encode,
)
from distbelief.control.sockets import dial
from distbelief.launch.hosting import Hosting, Role, StoreAddress
from distbelief.launch.launch import Launch
from distbelief.launch.pollloop import PollLoop
from distbelief.launch.processes import LogLine, LogPipe
from distbelief.lifeline import allow_open_files

HASTE_S = 0.3
GRACE_S = 3.0  # how long processes may take to end by themselves
ATTACH_EVERY_S = 1.0


@dataclass
class Room:
    """The largest numbers of workers and parameter servers that a host takes; -1: no limit."""

    workers: int = -1
    servers: int = -1


class Agent:
    def __init__(
        self,
        launch: Launch,
        host: str,
        authority: Authority,
        room: Room,
        show: LogLine,
        broken: Callable[[], None],
        elsewhere: StoreAddress | None = None,
    ) -> None:
        """`show` gets every line that a member prints. `broken` is called when this host can start no more members.
        `elsewhere`: the address of torch's rendezvous store, for the agent of another host."""
        allow_open_files()  # before the first child, which inherits the limit
        self.host = host
        self.room = room
        self.poll = PollLoop()
        self.answered_at = time.monotonic()
        self.outcome: EndRun | None = None
        """The run's end, after the coordinator has reported it."""
        self.is_sent_back = False
        """The run was started again, or another one with the same key is at its address."""
        self.repeated_events: list[Event] = []
        """Events that are sent again with every report, because the coordinator must receive them."""
        self._launch = launch
        self._credential = authority.agent()
        self._signer = self._credential.signer()
        self._leads = elsewhere is None
        self._show = show
        self._broken = broken
        self._stack = contextlib.ExitStack()
        self._epoch = 0
        self._next_attach = 0.0
        self.ended = False
        self._deadline = float("inf")
        self.hosting = Hosting(launch, host, authority, self.poll, self, elsewhere)
        self._stack.callback(self.hosting.close)

    def begin(self, address: str) -> None:
        """Connect to the coordinator at this address."""
        context = self._stack.enter_context(zmq.Context())
        self._socket = self._stack.enter_context(context.socket(zmq.DEALER))
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)  # a machine that is gone closes no connection
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20_000)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, 2_000)
        dial(self._socket, address, self._credential.coordinator_key)
        self.poll.watch(self._socket, self.hear)
        self.hosting.begin(address)

    def attach(self) -> None:
        """Report the whole state of this host. Repeated, so that a lost report, or a new coordinator, does no harm."""
        self._next_attach = time.monotonic() + ATTACH_EVERY_S
        there = self.hosting
        self.send(
            EngineAttached(
                self.host,
                there.running("worker"),
                there.exits("worker"),
                there.running("server"),
                there.exits("server"),
                self.room.workers,
                self.room.servers,
            )
        )
        for event in self.repeated_events:
            self.send(event)

    def serve(self, timeout_s: float) -> None:
        """One round of the poll loop: wait for events, then run due actions."""
        self.poll.serve(timeout_s)
        self.hosting.collect()
        now = time.monotonic()
        if now >= self._next_attach and not self.ended:
            self.attach()
        if now >= self._deadline:
            self._deadline = float("inf")
            self.finish(GRACE_S / 2)
            self.hosting.kill_all()

    @property
    def done(self) -> bool:
        return self.ended and self.hosting.is_empty

    def finish(self, grace_s: float = GRACE_S) -> None:
        """The run is over on this host: kill members that have not ended after the grace period."""
        self.ended = True
        self.hosting.cancel()
        self._deadline = min(self._deadline, time.monotonic() + grace_s)

    def join_again(self) -> None:
        """The run was started again: end all members here, so that this host can join it anew."""
        self.is_sent_back = True
        self.finish(0.0)

    def finish_by(self, grace_s: float) -> None:
        """Set the latest time at which the run ends here; the coordinator may end it before."""
        until = time.monotonic() + grace_s
        self._deadline = min(self._deadline, until) if self.ended else until

    # --- commands ----------------------------------------------------------------------------------------------------

    def hear(self) -> None:
        while self._socket.poll(0):
            self.answered_at = time.monotonic()
            self._obey(decode_command(self._socket.recv_multipart()[-1]))

    def _obey(self, command: Command) -> None:
        over = isinstance(command, JoinAgain)
        # The coordinator may or may not come to say this when its launching process is killed.
        if over or (isinstance(command, EndRun) and command.reason == LEADER_GONE and not self._leads):
            if not self._leads and not self.ended:
                self.join_again()
            return
        if isinstance(command, EndRun):
            # After a failure members have nothing left to do, and a worker that still loads reads no message.
            self.outcome = command
            self.finish(GRACE_S if command.status == "completed" else HASTE_S)
            return
        self._epoch = max(self._epoch, command.epoch)
        if command.epoch < self._epoch:
            return  # a command of an older coordinator
        match command:
            case StartWorker() if self._concerns_us(command.host) and self.room.workers:
                self.hosting.start("worker", command.worker)
            case StartServer() if self._concerns_us(command.host) and self.room.servers:
                self.hosting.start("server", command.server)
            case KillWorker():
                self.hosting.kill("worker", command.worker)
            case KillServer():
                self.hosting.kill("server", command.server)

    def _concerns_us(self, host: str) -> bool:
        return not self.ended and (host == self.host or (host == "" and self._leads))

    # --- events ------------------------------------------------------------------------------------------------------

    def exited(self, role: Role, number: int, status: int, reason: str = "") -> None:
        self.send(WorkerExited(number, status, reason) if role == "worker" else ServerExited(number, status, reason))

    def cannot_host(self) -> None:
        self.room = Room(0, 0)
        self._broken()

    def send(self, event: Event) -> None:
        message = encode(event)
        with contextlib.suppress(zmq.Again):  # the queue is full; every report is repeated
            self._socket.send_multipart([self._signer.sign(message), message], zmq.NOBLOCK)

    def log(self, source: str) -> LogPipe:
        log = LogPipe(source, self._launch.run_dir / "logs" / f"{source.replace(' ', '-')}.log", self._show)
        self._stack.callback(log.close)

        def pump() -> None:
            if not log.pump():
                self.poll.unwatch(log.read_fd)
                log.close()

        self.poll.watch(log.read_fd, pump)
        return log

    def close(self) -> None:
        """Ends every process that this agent has started."""
        self._stack.close()


def signal_name(number: int) -> str:
    return signal.Signals(number).name
