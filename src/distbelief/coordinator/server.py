"""The coordinator's edge: a socket, a journal, a metrics file and a clock around the pure state machine.

It performs what `state.step` says and decides nothing itself, except that a message which is not from this run, is no
event, is not its sender's to say, or makes no sense now is dropped. An event is two frames, its sender's seal and the
msgpack bytes; a command is one frame. Heartbeats and ticks are not journaled; decisions are, by the state machine's
Records.
"""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from distbelief.control import messages as m
from distbelief.control.connectionlimit import ConnectionLimit
from distbelief.control.credentials import Keys
from distbelief.control.signatures import MALFORMED, UNEXPECTED, UNSIGNED, WRONG_SENDER, Refusals, Refused, Verifier
from distbelief.control.sockets import protect
from distbelief.coordinator import traceparts
from distbelief.coordinator.journal import Journal
from distbelief.coordinator.rules import state as s
from distbelief.coordinator.rules.authorization import FROM_SERVERS, FROM_WORKERS, is_introduced, may_send
from distbelief.coordinator.rules.progress import REMEMBERED, Seen
from distbelief.errors import DistBeliefError

DEFAULT_LISTEN = "tcp://127.0.0.1:*"
MAX_MESSAGE_BYTES = 2 << 20
WAITING_MESSAGES = 100  # of one sender; what is more waits at the sender, not in our memory
TICK_S = 0.1
FLUSH_S = 0.2
LINGER_MS = 2000
MOST_COMPLAINTS = 100
_TAIL_BYTES = 1 << 20  # holds many more steps than are remembered


def bind(
    context: zmq.Context[zmq.Socket[bytes]], keys: Keys, listen: str = DEFAULT_LISTEN
) -> tuple[zmq.Socket[bytes], str]:
    """The socket that members connect to, and its address with the port filled in."""
    socket = context.socket(zmq.ROUTER)
    protect(socket, keys)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RCVHWM, WAITING_MESSAGES)
    if "[" in listen:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(listen)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise DistBeliefError(
            f"the coordinator cannot listen on {listen}: {error}", hint=f"use {DEFAULT_LISTEN} for any free port"
        ) from error
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return socket, address.rstrip(b"\0").decode()


class MetricsFile:
    """Lines for people and dashboards: buffered, and without the journal's guarantees."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[bytes] = []
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                self._lines.append(b"")  # a killed coordinator may have left half a line: do not write on to it
        except OSError as error:
            raise DistBeliefError(
                f"cannot write {path}: {error.strerror}", hint="check the run directory's permissions and free space"
            ) from error

    def add(self, line: dict[str, Any]) -> None:
        self._lines.append(msgspec.json.encode(line))

    def flush(self) -> None:
        if self._lines:
            data = memoryview(b"\n".join(self._lines) + b"\n")
            self._lines.clear()  # also when writing fails, so that what follows is not held up by it for ever
            while data:
                data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        os.close(self._fd)


def reported(path: Path) -> tuple[Seen, Seen]:
    """The last steps and evaluations, and what was said of them, from the metrics file of the coordinator before us."""
    steps: list[tuple[int, str]] = []
    evaluations: list[tuple[int, str]] = []
    floor = 0
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        for line in file.read(_TAIL_BYTES).split(b"\n"):
            try:
                entry = msgspec.json.decode(line)
            except msgspec.DecodeError:  # the first line read may be half a line, and so may the last one written
                continue
            if isinstance(entry, dict) and entry.get("kind") == "step":
                steps.append((int(entry["step"]), str(entry["fingerprint"])))
            elif isinstance(entry, dict) and entry.get("kind") == "evaluation":
                evaluations.append((int(entry["step"]), ""))
            elif isinstance(entry, dict) and entry.get("kind") == "rollback":  # what came after it comes again
                floor = int(entry["step"])
                steps = [one for one in steps if one[0] < floor]
                evaluations = [one for one in evaluations if one[0] <= floor]
    return _seen(steps, floor), _seen(evaluations, 0)


def _seen(found: list[tuple[int, str]], floor: int) -> Seen:
    found = found[-REMEMBERED:]
    return Seen(dict(found), min(step for step, _ in found)) if found else Seen(floor=floor)


class Wakeup(Protocol):
    """What, besides messages, may ask for the end: a signal, or the engine's end of the pipe."""

    def fileno(self) -> int: ...
    def read(self) -> str:
        """The reason to stop, or "" when there is none. Called after every wait."""
        ...


@dataclass
class Server:
    """Everything the loop holds. Construct it, then `serve`."""

    socket: zmq.Socket[bytes]
    limit: ConnectionLimit
    journal: Journal
    metrics: MetricsFile
    verifier: Verifier
    state: s.State
    clock: Callable[[], float] = time.time
    addresses: dict[int, bytes] = field(default_factory=dict)
    """Worker -> the ZeroMQ identity its last message came from."""
    servers: dict[int, bytes] = field(default_factory=dict)
    """Parameter server -> likewise."""
    engines: dict[str, bytes] = field(default_factory=dict)
    """Host -> the identity of the engine there."""
    parcel: Callable[[], bytes] = lambda: b""
    """What another host's agent is sent with its welcome; empty: it is not made yet."""
    encoded: tuple[m.Command | None, bytes] = (None, b"")
    """The last command and its bytes: one and the same goes to many members."""
    refusals: Refusals = field(default_factory=Refusals)
    """Includes the connections that `limit` closed."""
    broken: bool = False
    """The journal or the metrics file could not be written."""


def serve(server: Server, wakeup: Wakeup) -> int:
    """Run until the state machine says Exit; the exit status: 0 if every decision and line is on the disk.

    The socket is left open with its last messages in it: closing it and its context lets them out.
    """
    poller = zmq.Poller()
    poller.register(server.socket, zmq.POLLIN)
    poller.register(server.limit.events, zmq.POLLIN)
    poller.register(wakeup.fileno(), zmq.POLLIN | zmq.POLLERR)
    next_tick = next_flush = time.monotonic()
    done = False
    while not done:
        poller.poll(max(0, math.ceil((next_tick - time.monotonic()) * 1000)))
        for identity, event in _received(server):
            done = handle(server, event, identity)
            if done:
                break
        server.limit.enforce()
        reason = wakeup.read()
        if reason and not done:
            done = handle(server, m.StopRequested(reason, at_once=True))
        now = time.monotonic()
        if now >= next_tick and not done:
            next_tick = now + TICK_S
            done = handle(server, s.Ticked())
        if now >= next_flush and not done:
            next_flush = now + FLUSH_S
            _tell_of_refusals(server, now)
            done = perform(server, [], flush=True)
    try:
        server.metrics.flush()
    except OSError as error:
        server.broken = True
        _say(f"cannot write {server.metrics.path}: {error.strerror}")
    return 1 if server.broken else 0


def handle(server: Server, event: s.Input, identity: bytes = b"") -> bool:
    """Feed one event to the state machine and do what it says; whether the run is over."""
    if isinstance(event, m.HostOffered) and not server.parcel():
        return False  # it asks again
    try:
        if isinstance(event, FROM_WORKERS) and not is_introduced(server.state.workers, event):
            raise s.ProtocolError(f"{type(event).__name__} of worker {event.worker}, which has not joined")
        server.state, outputs = s.step(server.state, event, server.clock())
    except s.ProtocolError as error:
        _complain(server, error.message)
        return False
    except Exception:
        if not identity:
            raise
        # Nothing was changed by it; whoever sent it, the run does not end with it.
        _complain(server, f"no sense can be made of {type(event).__name__}: {traceback.format_exc()}")
        return False
    if isinstance(event, m.TracePart) and (why_not := traceparts.keep(server.metrics.path.parent, event)):
        _complain(server, why_not)
    if isinstance(event, m.EngineAttached):
        server.engines[event.host] = identity
        _post(server, identity, m.Answer(server.state.epoch, True, "heard"))  # that we are not frozen
    elif isinstance(event, FROM_WORKERS) and identity not in server.engines.values():
        server.addresses[event.worker] = identity
    elif isinstance(event, FROM_SERVERS):
        server.servers[event.server] = identity
    return perform(server, outputs, identity)


def perform(server: Server, outputs: Iterable[s.Output], sender: bytes = b"", flush: bool = False) -> bool:
    """Do it, in order; whether the run is over. When the disk fails, the run ends and everybody is told."""
    try:
        if flush:
            server.metrics.flush()
        return _perform(server, outputs, sender)
    except OSError as error:
        if server.broken:
            raise
        server.broken = True
        text = f"the coordinator cannot write the run's files in {server.metrics.path.parent}: {error.strerror}"
        _say(text)
        failed = s.CoordinatorFailed(text, "free some space, or check the permissions of the run directory")
        server.state, outputs = s.step(server.state, failed, server.clock())
        return _perform(server, outputs, sender)


def _perform(server: Server, outputs: Iterable[s.Output], sender: bytes) -> bool:
    over = False
    for output in outputs:
        match output:
            case s.Record(entry):
                _record(server, entry)
            case s.Report(line):
                server.metrics.add(line)
            case s.Send(worker, command):
                _send(server, worker, command)
            case s.SendServer(number, command):
                for identity in _chosen(server.servers, number):
                    _post(server, identity, command)
            case s.Reply(m.Welcome() as command):
                _post(server, sender, command, server.parcel())
            case s.Reply(command):
                _post(server, sender, command)
            case s.Exit():
                over = True
    return over


def _record(server: Server, entry: dict[str, Any]) -> None:
    try:
        # Whoever hears of a decision finds the lines that led to it in the file.
        if entry["kind"] == "ended" and server.refusals.counts:
            _tell_of_refusals(server, math.inf)
            entry = {**entry, "refused": dict(server.refusals.counts)}
        server.metrics.flush()
        server.journal.append(entry)
    except OSError as error:
        if not server.broken:
            raise
        # The disk has failed before; the members must be told all the same.
        _say(f"could not record {entry['kind']} ({entry['reason']}): {error.strerror}")


def _send(server: Server, worker: int, command: m.Command) -> None:
    identities = list(server.engines.values()) if worker == s.ENGINE else _chosen(server.addresses, worker)
    for identity in identities:
        _post(server, identity, command)


def _chosen(addresses: dict[int, bytes], number: int) -> list[bytes]:
    if number == s.EVERYBODY:
        return list(addresses.values())
    return [addresses[number]] if number in addresses else []


def _post(server: Server, identity: bytes, command: m.Command, *more: bytes) -> None:
    if server.encoded[0] is not command:
        server.encoded = (command, m.encode(command))
    try:
        server.socket.send_multipart([identity, server.encoded[1], *more], flags=zmq.DONTWAIT)
    except zmq.ZMQError as error:
        # A peer that is gone, or does not read, must not hold up the others.
        _say(f"could not send {type(command).__name__}: {error}")


def _received(server: Server) -> Iterable[tuple[bytes, m.Event]]:
    """The messages that are waiting, less those that are not ours. Bounded, so that a flood does not stop the clock."""
    for _ in range(1000):
        try:
            identity = server.socket.recv(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return
        try:
            event = _heard(server.verifier, server.socket.recv_multipart())
        except Refused as refused:
            server.refusals.add(refused.reason)
            continue
        server.limit.authenticated(identity)
        yield identity.bytes, event


def _heard(verifier: Verifier, frames: list[bytes]) -> m.Event:
    if len(frames) != 2:
        raise Refused(UNSIGNED)
    sender = verifier.verify(frames[0], frames[1], time.monotonic())
    try:
        event = m.decode_event(frames[1])
    except msgspec.MsgspecError:
        raise Refused(MALFORMED) from None
    if not may_send(sender, event):
        raise Refused(WRONG_SENDER)
    return event


def _tell_of_refusals(server: Server, now: float) -> None:
    """In the log and to whoever watches, now and then: a flood of strangers is no flood of lines."""
    if text := server.refusals.news(now):
        _say(text)
        server.metrics.add({"kind": "refused", "counts": dict(server.refusals.counts), "at": server.clock()})
        server.metrics.add({"kind": "notice", "text": f"the coordinator {text}", "at": server.clock()})


def _complain(server: Server, why: str) -> None:
    """Of a message by somebody who may speak; at length, but not for ever."""
    server.refusals.add(UNEXPECTED)
    if server.refusals.counts[UNEXPECTED] <= MOST_COMPLAINTS:
        _say(f"dropped a message: {why}")


def _say(text: str) -> None:
    print(f"coordinator: {text}", file=sys.stderr, flush=True)
