"""ZeroMQ sockets of the control plane: which of them are encrypted and authenticated (CURVE).

Every listening process has a CURVE key pair derived from a secret (credentials.py). A process that knows the
public key can connect and can check that it talks to the right process; a process that does not know it fails in the
handshake. Sockets of parameter servers on loopback are not encrypted, because tensors move there at the speed of
memory; the messages on them are signed all the same (signatures.py).
"""

from __future__ import annotations

import struct
from urllib.parse import urlsplit

import zmq

from distbelief.control.credentials import Keys

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
HANDSHAKE_MS = 15_000
"""A connection whose handshake is not complete after this time is closed."""
_EVENT = struct.Struct("=Hi")


def next_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """The next event of a socket's monitor, and the event's value. (zmq.utils.monitor would import asyncio.)"""
    event, value = _EVENT.unpack(monitor.recv_multipart(zmq.NOBLOCK)[0])
    return int(event), int(value)


def host_of(address: str) -> str:
    """
    >>> host_of("tcp://10.0.0.1:5555"), host_of("tcp://[::1]:*")
    ('10.0.0.1', '::1')
    """
    netloc = urlsplit(address).netloc
    return netloc.rpartition(":")[0].strip("[]")


def is_loopback(address: str) -> bool:
    return host_of(address) in LOOPBACK


def dial(socket: zmq.Socket[bytes], address: str, server_key: bytes) -> None:
    """Connect, encrypted, to the listening socket whose public key is `server_key`."""
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = server_key
    _connect(socket, address)


def dial_server(socket: zmq.Socket[bytes], address: str, server_key: bytes) -> None:
    """Connect to a parameter server: encrypted, except on loopback."""
    if is_loopback(address):
        _connect(socket, address)
    else:
        dial(socket, address, server_key)


def _connect(socket: zmq.Socket[bytes], address: str) -> None:
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    socket.connect(address)


def protect(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Before a socket is bound: accept only connections that know its public key."""
    socket.curve_publickey, socket.curve_secretkey = keys
    socket.curve_server = True
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


def protect_server(socket: zmq.Socket[bytes], address: str, keys: Keys) -> None:
    """Before a parameter server's socket is bound to `address`: as `protect`, except on loopback."""
    if not is_loopback(address):
        protect(socket, keys)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
