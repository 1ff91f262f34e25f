"""The worker's line to the coordinator: one thread that owns the socket, sends heartbeats and carries commands in.

The training thread never touches the socket: it leaves events in a queue and takes actions from another.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

import msgspec
import zmq

from distbelief.control.credentials import Credential
from distbelief.control.messages import (
    Command,
    Evaluation,
    Event,
    Heartbeat,
    ServerMap,
    StepReport,
    Timing,
    decode_command,
    encode,
)
from distbelief.control.sockets import dial, next_event
from distbelief.transport.abort import Abort
from distbelief.worker.rules import control
from distbelief.worker.rules.control import (
    AbortStep,
    Action,
    GenerationFinished,
    LearnMap,
    Leave,
    Save,
    Seal,
    TellAgain,
    TrainGeneration,
    WorkerState,
)

HEARTBEAT_S = 0.2
LEASE_S = 300.0  # without a coordinator for so long, it will not come back: minutes, so that a restart is never noticed
GRACE_S = 2.0  # how long the training thread may take to leave before the process ends anyway


_Item = Event | GenerationFinished | threading.Event | None


@dataclass
class Progress:
    """What the training thread leaves for the next heartbeat. Assignments and deques: no lock on the step path."""

    step: int = 0
    timing: Timing = field(default_factory=Timing)
    reports: deque[StepReport] = field(default_factory=deque)
    evaluations: deque[Evaluation] = field(default_factory=deque)
    waiting: Callable[[], bool] = lambda: False
    recall: Callable[[int], None] = lambda reported: None
    """Leave reports of the steps from here on again, where they are kept."""
    save: Callable[[Save], None] = lambda wish: None
    seal: Callable[[Seal], None] = lambda wish: None
    """Checkpoints that the coordinator asks for."""
    learn: Callable[[ServerMap], None] = lambda known: None
    servers: Callable[[], int] = lambda: 0
    """The map of parameter servers: `learn` takes a newer map, `servers` returns the known version."""


class ControlLink:
    """Use as a context manager; leaving it sends what is queued and ends the thread."""

    def __init__(self, address: str, credential: Credential) -> None:
        self.progress = Progress()
        self.actions: SimpleQueue[tuple[Action, Abort]] = SimpleQueue()
        """(action, abort flag). The flag ends the work of a generation."""
        self._address = address
        self._server_key = credential.coordinator_key
        self._signer = credential.signer()
        self._state = WorkerState(credential.number)
        self._abort = Abort()  # of the newest generation
        self._story: dict[type, Event] = {}
        self._outbox: SimpleQueue[_Item] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def __enter__(self) -> ControlLink:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._post(None)
        self._thread.join(timeout=5)

    def send(self, event: Event) -> None:
        """Tell the coordinator. It is told again if it asks: a new one does not know what the one before it knew."""
        self._post(event)

    def flush(self, timeout_s: float = 1.0) -> None:
        """Return when what was sent has left this thread's hands: for what must be known even if we die at once."""
        sent = threading.Event()
        self._post(sent)
        sent.wait(timeout_s)

    def finished(self, generation: int) -> None:
        self._post(GenerationFinished(generation))

    def _post(self, item: _Item) -> None:
        self._outbox.put(item)
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # a worker without its line to the coordinator must not linger

    def _serve(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 2000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)  # a machine that is gone closes no connection
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20_000)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 2_000)  # the kernel would wait for minutes
        contact = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        dial(socket, self._address, self._server_key)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        poller.register(contact, zmq.POLLIN)
        next_beat = time.monotonic()
        alone_since: float | None = next_beat
        try:
            while self._carry_out(socket):
                wait_s = max(0.0, next_beat - time.monotonic())
                ready = dict(poller.poll(int(wait_s * 1000) + 1))
                if socket in ready:
                    self._receive(socket)
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if contact in ready:
                    connected = next_event(contact)[0] == zmq.EVENT_HANDSHAKE_SUCCEEDED
                    # It is also told of every attempt that fails: what counts is since when there is nobody.
                    alone_since = None if connected else alone_since or time.monotonic()
                if alone_since is not None and time.monotonic() - alone_since > LEASE_S:
                    print(f"no coordinator for {LEASE_S:.0f} s: this worker gives up", flush=True)
                    os._exit(1)
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + HEARTBEAT_S
                    self._beat(socket)
        finally:
            socket.disable_monitor()
            contact.close()
            socket.close()
            context.term()

    def _carry_out(self, socket: zmq.Socket[bytes]) -> bool:
        """Send what the training thread has left. False: it is done."""
        while not self._outbox.empty():
            item = self._outbox.get()
            if item is None:
                return False
            if isinstance(item, GenerationFinished):
                self._decide(item)
            elif isinstance(item, threading.Event):
                item.set()
            else:
                self._beat(socket)  # what it left before this event goes first
                self._story.pop(type(item), None)  # in the order in which they were last said
                self._story[type(item)] = item
                self._send(socket, item)
        return True

    def _beat(self, socket: zmq.Socket[bytes]) -> None:
        progress = self.progress
        reports = [progress.reports.popleft() for _ in range(len(progress.reports))]
        evaluations = [progress.evaluations.popleft() for _ in range(len(progress.evaluations))]
        beat = Heartbeat(
            self._state.worker,
            self._state.epoch,
            self._state.generation,
            progress.step,
            progress.timing,
            reports,
            evaluations,
            progress.waiting(),
            self._state.phase == "finished",
            progress.servers(),
        )
        self._send(socket, beat)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                command = decode_command(frames[-1])
            except msgspec.MsgspecError:
                continue  # not a message of ours
            said = self._decide(command)
            if said:
                self._beat(socket)  # what it has to tell of steps, before the news that it has finished
            for event in said:
                self._send(socket, event)

    def _decide(self, event: Command | GenerationFinished) -> list[Event]:
        """Carry out what follows from it. Returns what is to be said."""
        self._state, actions = control.step(self._state, event)
        said: list[Event] = []
        for action in actions:
            match action:
                case AbortStep(reason):
                    self._abort.set(reason)
                case TellAgain(reported):
                    said += self._story.values()
                    self.progress.recall(reported)
                case Save():
                    self.progress.save(action)
                case Seal():
                    self.progress.seal(action)
                case LearnMap(known):
                    self.progress.learn(known)
                case TrainGeneration():
                    self._abort = Abort()
                    self.actions.put((action, self._abort))
                case _:
                    self.actions.put((action, self._abort))
            if isinstance(action, Leave):
                threading.Thread(target=_insist, daemon=True).start()
        return said

    def _send(self, socket: zmq.Socket[bytes], event: Event) -> None:
        """A message that does not fit into the queue is dropped: no coordinator has listened for minutes, and a new
        coordinator asks for all events again."""
        message = encode(event)
        with contextlib.suppress(zmq.Again):
            socket.send_multipart([self._signer.sign(message), message], zmq.NOBLOCK)


def _insist() -> None:
    """The run is over. A training thread that is deep in user code cannot be interrupted: end the process."""
    time.sleep(GRACE_S)
    os._exit(0)
