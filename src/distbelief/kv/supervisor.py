"""The supervisor of a key-value service: it starts servers, replaces servers that end, and sends the map to all.

One thread, one poll loop. Sockets, processes and the clock are here; kv/rules/supervision.py decides. The supervisor
also owns the memory that servers and clients of this machine share.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket as sockets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

import distbelief.kv.supervisormessages as m
from distbelief.control.connectionlimit import ConnectionLimit
from distbelief.control.credentials import KeyAuthority
from distbelief.control.messages import (
    SECRET_BYTES,
    STATUS_NOT_STARTED,
    EndRun,
    Serve,
    ServerBeat,
    ServerFailed,
    ServerReady,
    SliceCopied,
)
from distbelief.control.signatures import MALFORMED, OWNER, SERVER, UNSIGNED, WRONG_SENDER, Refusals, Refused, Sender
from distbelief.coordinator.rules.servers.fleet import Fleet
from distbelief.coordinator.server import bind
from distbelief.errors import DistBeliefError
from distbelief.kv.rules import supervision
from distbelief.kv.service import CONNECTION_FILE, Connection, this_boot, write_connection_file
from distbelief.launch.pollloop import PollLoop
from distbelief.launch.processes import LogPipe, NotStarted, Zygote
from distbelief.lifeline import allow_open_files
from distbelief.transport.shm.memfd import free_memory_bytes, receive_message
from distbelief.transport.shm.segmentserver import SegmentServer

TICK_S = 0.2
GONE_S = 120.0
"""A client that is silent for this long gets no maps until its next heartbeat."""
_AGAIN_S = 2.0  # until the next attempt to start a server that could not be started
SEGMENT_SOCKET = "segments.sock"
_SERVER = "distbelief.kv.server"
_ZYGOTE_STRATEGY = "ps:sync"
"""The zygote imports the modules of this strategy, because the servers of the service are parameter servers."""


@dataclass(frozen=True)
class ServiceOptions:
    folder: Path
    """The folder of the connection file and the logs. Only its owner may read it."""
    servers: int = 2
    listen: str = "tcp://127.0.0.1:*"
    shares: bool = True
    """Whether clients on this machine read values from shared memory."""


@dataclass
class _Client:
    number: int
    identity: bytes
    heard_at: float


class Supervisor:
    """A context manager: on exit it ends the servers and frees everything."""

    def __init__(self, options: ServiceOptions, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._stack = contextlib.ExitStack()
        self._authority = KeyAuthority(secrets.token_bytes(SECRET_BYTES))
        self._verifier = self._authority.verifier()
        self._refusals = Refusals()
        self._segments = SegmentServer()
        self._room = free_memory_bytes() // min(options.servers, 2)  # every value has two holders, if there are two
        self._loop = PollLoop()
        self._pids: dict[int, int] = {}
        self._identities: dict[int, bytes] = {}
        self._clients: dict[str, _Client] = {}
        self._next_client = 0
        self._failed: supervision.Fail | None = None
        self._owned: dict[sockets.socket, str] = {}
        """Socket -> the prefix of the names of the memory that its client has made."""
        self._departed: list[tuple[float, str]] = []
        """(when to free it, prefix of its names) for the memory of each client that is gone."""

    def __enter__(self) -> Supervisor:
        try:
            self._begin()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _begin(self) -> None:
        options, stack = self._options, self._stack
        stack.callback(self._segments.close)
        allow_open_files()
        context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
        try:
            self._socket, self.address = bind(context, self._authority.keys(), options.listen)
        except DistBeliefError as error:
            raise DistBeliefError(error.message.replace("the coordinator", "the service"), hint=error.hint) from error
        stack.callback(self._socket.close, 500)
        self._limit = ConnectionLimit(self._socket, self._refusals)
        stack.callback(self._limit.close)
        self._listener = self._listen(options.folder / SEGMENT_SOCKET)
        stack.callback(self._listener.close)
        self._loop.watch(self._socket, self._receive)
        self._loop.watch(self._limit.events, self._limit.enforce)
        self._loop.watch(self._listener, self._accept)
        self._zygote = Zygote(self._log("starter"), _ZYGOTE_STRATEGY)
        stack.callback(self._zygote.close)
        self._loop.watch(self._zygote.socket, self._warm)
        self._fleet = Fleet()
        self._refused: list[tuple[float, int]] = []
        """(when it counts as dead, server) of servers that could not be started."""

    def _listen(self, path: Path) -> sockets.socket:
        listener = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
        path.unlink(missing_ok=True)
        before = os.umask(0o077)
        try:
            listener.bind(str(path))
        except OSError as error:
            listener.close()
            raise DistBeliefError(
                f"cannot listen on {path}: {error}", hint="name a folder on a local disk, with a shorter path"
            ) from error
        finally:
            os.umask(before)
        listener.listen()
        return listener

    # --- the life of the service -------------------------------------------------------------------------------------

    def run(self, stop: int, ready: Callable[[Path], None]) -> None:
        """Run until the descriptor `stop` is readable. Calls `ready` once, with the path of the connection file."""
        stopped: list[bool] = []
        self._loop.watch(stop, lambda: stopped.append(True))
        path = self._options.folder / CONNECTION_FILE
        told = False
        try:
            while not stopped:
                self._loop.serve(TICK_S)
                for event in self._zygote.early_exits:
                    self._exited(event)
                self._zygote.early_exits.clear()
                self._refuse_due(time.monotonic())
                self._do(supervision.ticked(self._fleet, time.monotonic()))
                self._forget_clients()
                if news := self._refusals.news(time.monotonic()):
                    self._say(news)
                if self._failed:
                    log = next(iter(self._failed.hint.split()[-1:]), "")
                    raise DistBeliefError(
                        self._failed.message, hint=self._failed.hint, details=_tail(self._options.folder / log)
                    )
                if self._fleet.life and not told:
                    told = True
                    segments = str(self._options.folder / SEGMENT_SOCKET) if self._options.shares else ""
                    boot = this_boot()
                    secret = self._authority.secret.hex()
                    write_connection_file(path, Connection(self.address, secret, boot, segments))
                    ready(path)
        finally:
            path.unlink(missing_ok=True)
            (self._options.folder / SEGMENT_SOCKET).unlink(missing_ok=True)
            self._end()

    def _end(self) -> None:
        reason = self._failed.message if self._failed else "the service was stopped"
        for client in self._clients.values():
            self._send(client.identity, EndRun(1, "failed" if self._failed else "stopped", reason))
        for identity in self._identities.values():
            self._send(identity, EndRun(1, "stopped", reason))

    # --- processes ---------------------------------------------------------------------------------------------------

    def _warm(self) -> None:
        self._zygote.wait_ready()
        self._loop.watch(self._zygote.socket, self._process_ended)
        self._do(supervision.begun(self._options.servers, time.monotonic()))

    def _start(self, number: int) -> None:
        host = sockets.gethostname()
        spec = {
            "worker": number,
            "host": host,
            "address": self.address,
            "credential": msgspec.to_builtins(self._authority.run.server(number)),
            "slices": supervision.slices_for(self._options.servers),
            "room": self._room,
            "shares": self._options.shares,
        }
        try:
            pid, channel = self._zygote.fork_entry(number, _SERVER, spec, self._log(f"server-{number}"))
        except NotStarted as error:
            self._say(f"server {number} could not be started: {error.message}")
            self._refused.append((time.monotonic() + _AGAIN_S, number))
            return
        self._pids[pid] = number
        self._loop.watch(channel, lambda: self._segment_asked(channel))

    def _refuse_due(self, now: float) -> None:
        """Count starts that failed a while ago: each brings another attempt, or the end."""
        due = [number for at, number in self._refused if at <= now]
        self._refused = [(at, number) for at, number in self._refused if at > now]
        for number in due:
            self._do(supervision.exited(self._fleet, number, STATUS_NOT_STARTED, now))

    def _process_ended(self) -> None:
        try:
            event, _ = receive_message(self._zygote.socket)
        except EOFError:
            self._loop.unwatch(self._zygote.socket)
            self._failed = supervision.Fail(
                "the process that starts servers has ended, and the servers with it", "look in starter.log"
            )
            return
        self._exited(event)

    def _exited(self, event: dict[str, Any]) -> None:
        if event.get("event") == "exited" and event["pid"] in self._pids:
            number = self._pids.pop(event["pid"])
            self._identities.pop(number, None)
            self._segments.drop_all(f"server {number}/")
            self._do(supervision.exited(self._fleet, number, event["status"], time.monotonic()))

    def _log(self, name: str) -> LogPipe:
        pipe = LogPipe(name, self._options.folder / f"{name}.log", lambda source, line: None)
        self._loop.watch(pipe.read_fd, lambda: self._logged(pipe))
        self._stack.callback(pipe.close)
        return pipe

    def _logged(self, pipe: LogPipe) -> None:
        if not pipe.pump():
            self._loop.unwatch(pipe.read_fd)
            pipe.close()

    # --- memory ------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        self._loop.watch(client, lambda: self._segment_asked(client))

    def _segment_asked(self, asker: sockets.socket) -> None:
        """Answer a request for shared memory. The kernel closes the socket when a client ends. A client that is only
        stopped (SIGSTOP) keeps its socket and its memory."""
        try:
            owner, line, _ = self._segments.answer(asker).partition("/")
            if owner.startswith("client "):
                self._owned[asker] = owner + line
        except (EOFError, OSError, ValueError, KeyError, TypeError):
            if asker in self._owned:  # a server may still have to map its last pushes
                self._departed.append((time.monotonic() + GONE_S, self._owned.pop(asker)))
            self._loop.unwatch(asker)
            asker.close()

    def _forget_clients(self) -> None:
        now = time.monotonic()
        self._clients = {name: one for name, one in self._clients.items() if now - one.heard_at < GONE_S}
        while self._departed and self._departed[0][0] < now:
            self._segments.drop_all(self._departed.pop(0)[1])

    # --- messages ----------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        for _ in range(1000):
            try:
                identity = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                message = self._heard(self._socket.recv_multipart())
            except Refused as refused:
                self._refusals.add(refused.reason)
                continue
            self._limit.authenticated(identity)
            self._hear(identity.bytes, message)

    def _heard(self, frames: list[bytes]) -> m.Heard:
        if len(frames) != 2:
            raise Refused(UNSIGNED)
        sender = self._verifier.verify(frames[0], frames[1], time.monotonic())
        try:
            message = m.decode_heard(frames[1])
        except msgspec.MsgspecError:
            raise Refused(MALFORMED) from None
        if not _may_say(sender, message):
            raise Refused(WRONG_SENDER)
        return message

    def _hear(self, identity: bytes, message: m.Heard) -> None:
        now = time.monotonic()
        match message:
            case ServerReady(server=server, host=host, pid=pid, address=address):
                self._identities[server] = identity
                self._do(supervision.ready(self._fleet, server, host, pid, address, now), identity)
            case ServerBeat(server=server, version=version):
                self._do(supervision.beat(self._fleet, server, version, now), identity)
            case SliceCopied(server=server, slice=number, target=target, known=known):
                self._do(supervision.copied(self._fleet, number, server, target, known))
            case ServerFailed(server=server, message=text):
                self._say(f"server {server}: {text}")  # the server ends next
            case m.ClientHere(name=name, version=version):
                self._greet(identity, name, version, now)
            case m.ClientGone(name=name):
                self._clients.pop(name, None)

    def _greet(self, identity: bytes, name: str, version: int, now: float) -> None:
        known = self._fleet.map()
        if known is None:
            return  # the client asks again
        if name not in self._clients:
            self._clients[name] = _Client(self._next_client, identity, now)
            self._next_client += 1
        client = self._clients[name]
        client.identity, client.heard_at = identity, now
        self._send(identity, m.Welcome(client.number, supervision.slices_for(self._options.servers)))
        if version < known.version:
            self._send(identity, Serve(1, known))

    def _send(self, identity: bytes, message: m.Told) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the receiver is gone
            self._socket.send_multipart([identity, m.encode(message)], zmq.NOBLOCK)

    def _do(self, result: supervision.Result, speaker: bytes = b"") -> None:
        self._fleet, outputs = result
        known = self._fleet.map()
        for one in outputs:
            match one:
                case supervision.Start(server=server):
                    self._start(server)
                case supervision.Kill(server=server):
                    for pid in [pid for pid, number in self._pids.items() if number == server]:
                        self._zygote.kill(pid)
                case supervision.Tell() if known:
                    self._send(speaker, Serve(1, known))
                case supervision.TellAll() if known:
                    told = Serve(1, known)
                    for identity in [*self._identities.values(), *(one.identity for one in self._clients.values())]:
                        self._send(identity, told)
                case supervision.Say(text=text):
                    self._say(text)
                case supervision.Fail():
                    self._failed = one


def _may_say(sender: Sender, message: m.Heard) -> bool:
    """Whether the authenticated sender may send the message. A server speaks for itself alone; a client has the secret
    of the connection file."""
    if isinstance(message, m.ClientHere | m.ClientGone):
        return sender.role == OWNER
    return sender == (SERVER, message.server)


def _tail(path: Path) -> str:
    """The last lines of a log."""
    with contextlib.suppress(OSError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-15:])
    return ""
