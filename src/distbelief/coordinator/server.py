"""The coordinator's edge: a socket, a journal, a metrics file and a clock around the pure state machine.

The server performs the outputs of `state.step` and decides nothing itself. It only drops messages that are not validly
signed, are malformed, are not allowed for their sender (rules/authorization.py), or make no sense in the present state.
An event is two frames, its signature and the msgpack bytes; a command is one frame. Heartbeats and ticks are not
written to the journal; decisions are, as the state machine's Records.

While the journal's disk has no room, a decision waits, and everything after it (`_append`). Members train on, as while
no coordinator runs. Messages are received meanwhile, and handled afterwards; requests from outside are answered.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import zmq

from distbelief.atomicfile import ROOM_WAIT_S, lacks_room
from distbelief.control import messages as m
from distbelief.control.connectionlimit import ConnectionLimit
from distbelief.control.credentials import Keys
from distbelief.control.signatures import (
    MALFORMED,
    OTHER_START,
    TOO_LONG,
    UNEXPECTED,
    UNSIGNED,
    WRONG_SENDER,
    Refusals,
    Refused,
    Sender,
    Verifier,
)
from distbelief.control.sockets import protect
from distbelief.coordinator.journal import Journal
from distbelief.coordinator.metricsfile import MetricsFile
from distbelief.coordinator.rules import state as s
from distbelief.coordinator.rules.authorization import FROM_SERVERS, FROM_WORKERS, is_introduced, may_send
from distbelief.coordinator.runfiles import keep_trace
from distbelief.errors import DistBeliefError
from distbelief.steadyclock import CLOCK

DEFAULT_LISTEN = "tcp://127.0.0.1:*"
MAX_FRAME_BYTES = 2 * m.MAX_EVENT_BYTES
"""A sender of a longer frame is disconnected before its message is read. Between the two limits the message is dropped
under its sender's name. Our own senders send no event beyond the first limit (messages.encode)."""
WAITING_MESSAGES = 100  # per sender; more messages wait at the sender, not in our memory
TICK_S = 0.1
FLUSH_S = 0.2
LINGER_MS = 2000
MOST_COMPLAINTS = 100
RETRY_S = 0.5
"""How often a full disk is tried again."""


def bind(
    context: zmq.Context[zmq.Socket[bytes]], keys: Keys, listen: str = DEFAULT_LISTEN
) -> tuple[zmq.Socket[bytes], str]:
    """The socket that members connect to, and its address with the port filled in."""
    socket = context.socket(zmq.ROUTER)
    protect(socket, keys)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
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


class Wakeup(Protocol):
    """A cause, besides messages, that can end the run: a signal, or the end of the launching process."""

    def fileno(self) -> int: ...
    def read(self) -> str:
        """The reason to stop, or "". Called after every wait."""
        ...


@dataclass
class Server:
    """All that the loop needs. Construct it, then call `serve`."""

    socket: zmq.Socket[bytes]
    limit: ConnectionLimit
    journal: Journal
    metrics: MetricsFile
    verifier: Verifier
    state: s.State
    clock: Callable[[], float] = CLOCK.now
    addresses: dict[int, bytes] = field(default_factory=dict)
    """Worker -> the ZeroMQ identity of its last message."""
    servers: dict[int, bytes] = field(default_factory=dict)
    """Parameter server -> the ZeroMQ identity of its last message."""
    engines: dict[str, bytes] = field(default_factory=dict)
    """Host -> the ZeroMQ identity of its agent."""
    parcel: Callable[[], bytes] = lambda: b""
    """The bytes that another host's agent is sent with its Welcome; empty while they are not ready."""
    encoded: tuple[m.Command | None, bytes] = (None, b"")
    """The last command and its bytes, because the same command often goes to many members."""
    refusals: Refusals = field(default_factory=Refusals)
    """Includes the connections that `limit` closed."""
    sent_back: set[Sender] = field(default_factory=set)
    """Processes of other starts that were told to join again; the first MOST_COMPLAINTS of them."""
    broken: bool = False
    """The journal could not be written."""
    room_wait_s: float = ROOM_WAIT_S
    """How long a decision waits for room on the disk before the run ends."""
    backlog: dict[object, tuple[bytes, m.Event]] = field(default_factory=dict)
    """Messages that were received while a decision waited, in their order. Of repeated reports only the last."""
    stop_reason: Callable[[], str] = lambda: ""


def serve(server: Server, wakeup: Wakeup) -> int:
    """Run until the state machine returns Exit. Returns the exit status: 0 if all records are on disk.

    The socket stays open with its last messages in it: closing it and its context sends them.
    """
    poller = zmq.Poller()
    poller.register(server.socket, zmq.POLLIN)
    poller.register(server.limit.events, zmq.POLLIN)
    poller.register(wakeup.fileno(), zmq.POLLIN | zmq.POLLERR)
    server.stop_reason = wakeup.read
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
            _flush(server)
    _flush(server)
    return 1 if server.broken else 0


def handle(server: Server, event: s.Input, identity: bytes = b"") -> bool:
    """Feed one event to the state machine and perform its outputs. Returns whether the run is over."""
    if isinstance(event, m.HostOffered) and not server.parcel():
        return False  # the agent asks again
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
        # The state is unchanged. A message, whatever its sender, must not end the run.
        _complain(server, f"{type(event).__name__} could not be handled: {traceback.format_exc()}")
        return False
    if isinstance(event, m.TracePart) and (why_not := keep_trace(server.metrics.path.parent, event)):
        _complain(server, why_not)
    if isinstance(event, m.EngineAttached):
        server.engines[event.host] = identity
        _post(server, identity, m.Answer(server.state.epoch, True, "heard"))  # shows that we are not frozen
    elif isinstance(event, FROM_WORKERS) and identity not in server.engines.values():
        server.addresses[event.worker] = identity
    elif isinstance(event, FROM_SERVERS):
        server.servers[event.server] = identity
    return perform(server, outputs, identity)


def perform(server: Server, outputs: Iterable[s.Output], sender: bytes = b"") -> bool:
    """Perform outputs in order. Returns whether the run is over. If the disk fails, the run ends and all are told."""
    try:
        return _perform(server, outputs, sender)
    except OSError as error:
        if server.broken:
            raise
        server.broken = True
        text = f"the coordinator cannot write the run's files in {server.metrics.path.parent}: {error.strerror}"
        _say(text)
        hint = "free some space, or check the permissions of the run directory; then `distbelief resume` goes on"
        server.state, outputs = s.step(server.state, s.CoordinatorFailed(text, hint), server.clock())
        return _perform(server, outputs, sender)


def _perform(server: Server, outputs: Iterable[s.Output], sender: bytes) -> bool:
    over = False
    for output in outputs:
        match output:
            case s.Record(entry):
                _record(server, entry)
            case s.Report(line):
                server.metrics.add(line)
                if server.metrics.is_disk_full and line["kind"] == "notice":  # views read it when there is room
                    _say(line["text"])
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
        # The metrics lines that led to a decision are written before it.
        if entry["kind"] == "ended" and server.refusals.counts:
            _tell_of_refusals(server, math.inf)
            entry = {**entry, "refused": dict(server.refusals.counts)}
        _flush(server)
        _append(server, entry)
    except OSError as error:
        if not server.broken:
            raise
        # The disk has failed before; the members must still be told.
        _say(f"could not record {entry['kind']} ({entry['reason']}): {error.strerror}")


def _flush(server: Server) -> None:
    if news := server.metrics.flush():
        _say(news)


def _append(server: Server, entry: dict[str, Any]) -> None:
    """Make a decision durable. A disk without room is waited for: nothing is carried out that is not recorded."""
    since: float | None = None
    while True:
        try:
            server.journal.append(entry)
            break
        except OSError as error:
            now = time.monotonic()
            if since is None:
                since = now
                if lacks_room(error) and not server.broken:
                    _say(
                        f"cannot write the journal {server.journal.path}: {error.strerror}; the members train on, and "
                        f"the decision '{entry['kind']}' waits {server.room_wait_s:.0f} s for room: free some space"
                    )
            if not lacks_room(error) or server.broken or now - since > server.room_wait_s or server.stop_reason():
                raise
            _stand_by(server, RETRY_S)
    if since is not None:
        text = f"the journal can be written again after {time.monotonic() - since:.0f} s; the run goes on"
        _say(text)
        server.metrics.add({"kind": "notice", "text": f"the coordinator: {text}", "at": server.clock()})


def _stand_by(server: Server, seconds: float) -> None:
    """Receive messages, to be handled later, and tell the agents that this coordinator lives."""
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        server.socket.poll(math.ceil(left_s * 1000))
        for identity, event in _from_socket(server):
            if (answer := _meanwhile(server, event)) is not None:
                _post(server, identity, answer)
                if not answer.ok:
                    continue
            key = _repeated(event) or object()
            server.backlog.pop(key, None)
            server.backlog[key] = identity, event
        server.limit.enforce()
    for identity in server.engines.values():
        _post(server, identity, m.Answer(server.state.epoch, True, "heard"))
    _flush(server)


def _meanwhile(server: Server, event: m.Event) -> m.Answer | None:
    """The answer to an outside process, which would hear nothing before there is room. One that is not `ok` is all:
    the request is forgotten."""
    match event:
        case m.StopRequested() | m.ScaleRequested() | m.ServersRequested() | m.CheckpointRequested():
            text = "the coordinator waits for room on the run's disk; the request is kept: free some space"
            return m.Answer(server.state.epoch, True, text)
        case m.JoinRequested():  # its process would be gone by the time of the answer
            text = "the coordinator waits for room on the run's disk: free some space, and repeat the command"
            return m.Answer(server.state.epoch, False, text)
    return None


def _repeated(event: m.Event) -> tuple[str, object] | None:
    """What this event repeats, if only the last one counts: a heartbeat without reports, a host's whole state."""
    match event:
        case m.EngineAttached(host=host):
            return ("host", host)
        case m.ServerBeat(server=server):
            return ("server", server)
        case m.Heartbeat(worker=worker, reports=[], evaluations=[]):
            return ("worker", worker)
        case m.StopRequested(reason=reason, at_once=at_once):
            return ("stop", (reason, at_once))
    return None


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
        # A receiver that is gone or does not read must not hold up the others.
        _say(f"could not send {type(command).__name__}: {error}")


def _received(server: Server) -> Iterable[tuple[bytes, m.Event]]:
    """The waiting messages that are authentic, oldest first."""
    arriving = iter(_from_socket(server))
    while True:
        while server.backlog:
            yield server.backlog.pop(next(iter(server.backlog)))
        if (one := next(arriving, None)) is None:
            return
        yield one


def _from_socket(server: Server) -> Iterable[tuple[bytes, m.Event]]:
    """Bounded: a flood of messages must not stop the clock."""
    for _ in range(1000):
        try:
            identity = server.socket.recv(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return
        try:
            event = _heard(server.verifier, server.socket.recv_multipart())
        except Refused as refused:
            if refused.sender and refused.reason == OTHER_START:  # it is no attack
                _send_back(server, identity.bytes, refused.sender)
                continue
            server.refusals.add(refused.reason)
            continue
        server.limit.authenticated(identity)
        yield identity.bytes, event


def _send_back(server: Server, identity: bytes, sender: Sender) -> None:
    """Tell a process of another start with the same key that its run is over."""
    if sender not in server.sent_back and len(server.sent_back) < MOST_COMPLAINTS:
        server.sent_back.add(sender)
        _say(f"{sender.role} {sender.number} is of another start with the same key, and is told to join again")
    _post(server, identity, m.JoinAgain(server.state.epoch))


def _heard(verifier: Verifier, frames: list[bytes]) -> m.Event:
    if len(frames) != 2:
        raise Refused(UNSIGNED)
    sender = verifier.verify(frames[0], frames[1], time.monotonic())
    if len(frames[1]) > m.MAX_EVENT_BYTES:
        _say(f"dropped a message of {len(frames[1]) / 1e6:.1f} MB of {sender.role} {sender.number}")
        raise Refused(TOO_LONG)
    try:
        event = m.decode_event(frames[1])
    except msgspec.MsgspecError:
        raise Refused(MALFORMED) from None
    if not may_send(sender, event):
        raise Refused(WRONG_SENDER)
    return event


def _tell_of_refusals(server: Server, now: float) -> None:
    """Report refused messages in the log and in the metrics file, at a limited rate."""
    if text := server.refusals.news(now):
        _say(text)
        server.metrics.add({"kind": "refused", "counts": dict(server.refusals.counts), "at": server.clock()})
        server.metrics.add({"kind": "notice", "text": f"the coordinator {text}", "at": server.clock()})


def _complain(server: Server, why: str) -> None:
    """Report a dropped message of an authenticated sender, in full, MOST_COMPLAINTS times."""
    server.refusals.add(UNEXPECTED)
    if server.refusals.counts[UNEXPECTED] <= MOST_COMPLAINTS:
        _say(f"dropped a message: {why}")


def _say(text: str) -> None:
    print(f"coordinator: {text}", file=sys.stderr, flush=True)
