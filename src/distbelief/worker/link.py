"""The worker's connection to the coordinator: one thread owns the socket, sends heartbeats and receives commands.

The training thread never touches the socket: it puts events into a queue and takes actions from another queue.
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
    MessageTooLong,
    ServerMap,
    StepReport,
    Timing,
    WorkerFailed,
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
LEASE_S = 300.0  # without a coordinator for this long the worker gives up: long enough for a restart of the coordinator
GRACE_S = 2.0  # the training thread has this long to end before the process is ended


_Item = Event | GenerationFinished | threading.Event | None


@dataclass
class Progress:
    """What the training thread writes for the next heartbeat. Assignments and deques: no lock on the step path."""

    step: int = 0
    timing: Timing = field(default_factory=Timing)
    reports: deque[StepReport] = field(default_factory=deque)
    evaluations: deque[Evaluation] = field(default_factory=deque)
    waiting: Callable[[], bool] = lambda: False
    recall: Callable[[int], None] = lambda reported: None
    """Report the steps from `reported` on again; set by the member that keeps the reports."""
    save: Callable[[Save], None] = lambda wish: None
    seal: Callable[[Seal], None] = lambda wish: None
    """`save` and `seal` pass on the coordinator's requests for checkpoints."""
    learn: Callable[[ServerMap], None] = lambda known: None
    servers: Callable[[], int] = lambda: 0
    """The map of parameter servers: `learn` takes a newer map, `servers` returns the known version."""


class ControlLink:
    """The connection, as a context manager; its exit sends the queued events and ends the thread."""

    def __init__(self, address: str, credential: Credential) -> None:
        self.progress = Progress()
        self.actions: SimpleQueue[tuple[Action, Abort]] = SimpleQueue()
        """(action, abort flag). The flag aborts the work of a generation."""
        self._address = address
        self._server_key = credential.coordinator_key
        self._signer = credential.signer()
        self._state = WorkerState(credential.number)
        self._abort = Abort()  # of the newest generation
        self._last_events: dict[type, Event] = {}
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
        """Send an event to the coordinator. The thread repeats it when a new coordinator asks for all events again."""
        self._post(event)

    def flush(self, timeout_s: float = 1.0) -> None:
        """Wait until the thread has sent all queued events. Call it before an action that may kill this process."""
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
            os._exit(1)  # a worker without a connection to the coordinator must end

    def _serve(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 2000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)  # a machine that has failed closes no connection
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20_000)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 2_000)  # the kernel would try for minutes
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
                    # Every failed attempt is reported too: keep the time of the first one.
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
        """Send what the training thread has queued. Returns False when the link is to close."""
        while not self._outbox.empty():
            item = self._outbox.get()
            if item is None:
                return False
            if isinstance(item, GenerationFinished):
                self._decide(item)
            elif isinstance(item, threading.Event):
                item.set()
            else:
                self._beat(socket)  # reports from before this event go first
                self._last_events.pop(type(item), None)  # keep the order of the last sends
                self._last_events[type(item)] = item
                self._send(socket, item)
        return True

    def _beat(self, socket: zmq.Socket[bytes]) -> None:
        progress = self.progress
        reports = [progress.reports.popleft() for _ in range(len(progress.reports))]
        while True:
            # One evaluation at a time: a message has room for one with many metrics, not for several.
            evaluations = [progress.evaluations.popleft()] if progress.evaluations else []
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
            reports = []
            if not progress.evaluations:
                return

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                command = decode_command(frames[-1])
            except msgspec.MsgspecError:
                continue  # not one of our messages
            said = self._decide(command)
            if said:
                self._beat(socket)  # report the steps before the end of the run
            for event in said:
                self._send(socket, event)

    def _decide(self, event: Command | GenerationFinished) -> list[Event]:
        """Perform the actions that follow from the event. Returns the events to send."""
        self._state, actions = control.step(self._state, event)
        said: list[Event] = []
        for action in actions:
            match action:
                case AbortStep(reason):
                    self._abort.set(reason)
                case TellAgain(reported):
                    said += self._last_events.values()
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
                threading.Thread(target=_exit_after_grace, daemon=True).start()
        return said

    def _send(self, socket: zmq.Socket[bytes], event: Event) -> None:
        """Send without blocking. If the queue is full, no coordinator has read for minutes: drop the event, because a
        new coordinator asks for all events again."""
        try:
            message = encode(event)
        except MessageTooLong as error:
            worker = self._state.worker
            print(f"worker {worker}: {error.message}", flush=True)
            hint = "this is a limit of DistBelief: shorten names in the job, or have it measure less"
            message = encode(WorkerFailed(worker, "", "internal", error.message, hint))
        with contextlib.suppress(zmq.Again):
            socket.send_multipart([self._signer.sign(message), message], zmq.NOBLOCK)


def _exit_after_grace() -> None:
    """End the process: the run is over, and a training thread in user code cannot be interrupted."""
    time.sleep(GRACE_S)
    os._exit(0)
