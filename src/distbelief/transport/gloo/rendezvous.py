"""A member's side of the rendezvous of torch groups: the client of rendezvousserver.py, as a store of torch."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch.distributed as dist
import zmq
from torch._C._distributed_c10d import Store, TCPStore

from distbelief.control.credentials import Credential
from distbelief.control.sockets import dial
from distbelief.transport.abort import Abort
from distbelief.transport.gloo.rendezvousserver import (
    MAX_MESSAGE_BYTES,
    Add,
    Answer,
    Check,
    Request,
    Set,
    Wait,
    decode_answer,
    encode,
)

LOOK_MS = 20
"""Milliseconds between two checks for an abort during a wait."""
AGAIN_S = 2.0
"""Seconds after which an unanswered request is sent again; of a sum, which counts every request, only a question
whether the server is still the same."""


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous of a group: the store's address and the group's name (its generation)."""

    host: str
    port: int
    name: str
    timeout_s: float = 300.0
    credential: Credential | None = None
    """None: use torch's own store, which does not authenticate its clients."""

    def store(self, abort: Abort) -> Store:
        if self.credential is not None:
            where = f"[{self.host}]" if ":" in self.host else self.host
            return RendezvousStore(f"tcp://{where}:{self.port}", self.credential, self.timeout_s, abort.check)
        return TCPStore(self.host, self.port, is_master=False, timeout=datetime.timedelta(seconds=self.timeout_s))


class RendezvousStore(Store):
    """The client of the rendezvous server as a torch store. `check` raises when a wait is to be given up. torch calls
    it from one thread at a time, not always the same thread."""

    def __init__(self, address: str, credential: Credential, timeout_s: float, check: Callable[[], None]) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._check = check
        self._signer = credential.signer_to_servers()
        self._tickets = 0
        self._server = ""
        """The server that has answered. Another one does not have the keys of this group."""
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        dial(self._socket, address, credential.servers_key)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(lambda ticket: Set(ticket, self._server, key, _bytes(value)))

    def get(self, key: str) -> bytes:
        return self._ask(lambda ticket: Wait(ticket, self._server, [key]))[0]

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        self._ask(lambda ticket: Wait(ticket, self._server, list(keys)), timeout.total_seconds() if timeout else None)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(lambda ticket: Add(ticket, self._server, key, amount))[0])

    def check(self, keys: Sequence[str]) -> bool:
        return len(self._ask(lambda ticket: Check(ticket, self._server, list(keys)))) == len(keys)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _ask(self, make: Callable[[int], Request], timeout_s: float | None = None) -> list[bytes]:
        with self._lock:
            self._tickets += 1
            request = make(self._tickets)
            deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
            sent_at = float("-inf")
            while True:
                now = time.monotonic()
                if now - sent_at > AGAIN_S:
                    is_sum = isinstance(request, Add) and sent_at > 0
                    self._send(Check(self._tickets, self._server, []) if is_sum else request)
                    sent_at = now
                if self._socket.poll(LOOK_MS):
                    found = self._received()
                    if found is not None and found.ticket == self._tickets:
                        if self._server not in ("", found.server):
                            raise dist.DistStoreError("the rendezvous server died, and another one has taken its place")
                        self._server = found.server
                        if found.values or not isinstance(request, Add):
                            return found.values
                self._check()
                if now > deadline:
                    raise dist.DistStoreError(f"the members of a group did not connect: no answer to {request}")

    def _send(self, request: Request) -> None:
        message = encode(request)
        if len(message) > MAX_MESSAGE_BYTES:
            raise dist.DistStoreError(
                f"a message of {len(message) / 1e6:.1f} MB is too long for the rendezvous of a group"
            )
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([self._signer.sign(message), message], zmq.NOBLOCK)

    def _received(self) -> Answer | None:
        with contextlib.suppress(msgspec.MsgspecError):
            return decode_answer(self._socket.recv())
        return None


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
