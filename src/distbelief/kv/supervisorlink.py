"""A client's link to the supervisor: a thread that sends heartbeats and receives maps; and the deadlines of calls."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable

import msgspec
import zmq

import distbelief.kv.supervisormessages as m
from distbelief.control.credentials import Credential
from distbelief.control.messages import EndRun, Serve, ServerMap
from distbelief.control.sockets import dial
from distbelief.errors import DistBeliefError

HEARTBEAT_S = 0.5
LOOK_S = 0.05
SILENT_S = 20.0
"""After this silence a client considers the service dead."""


class SupervisorLink:
    def __init__(self, address: str, credential: Credential) -> None:
        self._address = address
        self._server_key = credential.coordinator_key
        self._signer = credential.signer()
        self._name = uuid.uuid4().hex
        self._learn: Callable[[ServerMap], None] = lambda known: None
        self._map: ServerMap | None = None
        self._welcome: m.Welcome | None = None
        self._here = threading.Event()
        self._closing = threading.Event()
        self._heard_at = time.monotonic()
        self._ended = ""
        self._thread = threading.Thread(target=self._live, name="distbelief kv", daemon=True)

    def begin(self, timeout_s: float) -> m.Welcome:
        """Register with the supervisor, and return the number of this client."""
        self._thread.start()
        if not self._here.wait(timeout_s) or self._welcome is None:
            self.close()
            raise DistBeliefError(
                f"no key-value service answers at {self._address}",
                hint="is it running, is the connection file its own, and does a firewall let its ports through?",
            )
        return self._welcome

    def tell(self, learn: Callable[[ServerMap], None]) -> None:
        """Call `learn` with every map from now on, from another thread."""
        self._learn = learn
        if self._map is not None:
            learn(self._map)

    def check(self) -> None:
        """Raise an error if the service has ended."""
        hint = "start it again (`distbelief kv`, kv.serve) and connect to it"
        if self._ended:
            raise DistBeliefError(f"the key-value service has ended: {self._ended}", hint=hint)
        if time.monotonic() - self._heard_at > SILENT_S:
            raise DistBeliefError(
                f"the key-value service at {self._address} has not answered for {SILENT_S:.0f} s", hint=hint
            )

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _live(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 200)
            dial(socket, self._address, self._server_key)
            next_time = 0.0
            while not self._closing.is_set():
                now = time.monotonic()
                if now >= next_time:
                    next_time = now + HEARTBEAT_S
                    self._send(socket, m.ClientHere(self._name, self._map.version if self._map else 0))
                if socket.poll(int(LOOK_S * 1000)):
                    self._hear(socket)
            self._send(socket, m.ClientGone(self._name))

    def _send(self, socket: zmq.Socket[bytes], message: m.Heard) -> None:
        data = m.encode(message)
        with contextlib.suppress(zmq.Again):
            socket.send_multipart([self._signer.sign(data), data], zmq.NOBLOCK)

    def _hear(self, socket: zmq.Socket[bytes]) -> None:
        with contextlib.suppress(zmq.Again, msgspec.MsgspecError):
            message = m.decode_told(socket.recv_multipart(zmq.NOBLOCK)[-1])
            self._heard_at = time.monotonic()
            match message:
                case m.Welcome():
                    self._welcome = message
                    self._here.set()
                case Serve(map=known):
                    self._map = known
                    self._learn(known)
                case EndRun(reason=reason):
                    self._ended = reason or "it was stopped"


class CallTimedOut(DistBeliefError):
    """A call was not answered in time. Its push is still applied, once, if the servers receive it."""


class Deadline:
    """Ends a wait if the service has ended or time is up. See `Stop` (ps/protocol/client.py)."""

    def __init__(self, link: SupervisorLink, seconds: float, what: str = "no answer", hint: str = "") -> None:
        self._link = link
        self._end = time.monotonic() + seconds
        self._text = f"{what} in {seconds:g} s"
        self._hint = hint

    def check(self) -> None:
        self._link.check()
        if time.monotonic() > self._end:
            raise CallTimedOut(self._text, hint=self._hint)
