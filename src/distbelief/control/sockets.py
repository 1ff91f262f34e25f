"""Reaching whoever listens: encrypted and authenticated (CURVE), except for tensors that stay on this machine.

Who listens has a key pair that follows from the run's secret (badges.py). Whoever knows the public one can check whom
it talks to and be let in; whoever does not cannot even shake hands. Between members on loopback, where parameter
servers move tensors at the speed of memory, what is said is signed (seals.py), but not encrypted.
"""

from __future__ import annotations

import struct
from urllib.parse import urlsplit

import zmq

from distbelief.control.credentials import Keys

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
HANDSHAKE_MS = 15_000
"""Who connects and has not said who it is for so long is disconnected."""
_EVENT = struct.Struct("=Hi")


def hear_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """What a socket's monitor tells next: which event, and its number. (zmq.utils.monitor imports asyncio.)"""
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


def dial(socket: zmq.Socket[bytes], address: str, door: bytes) -> None:
    """Connect to the coordinator whose public key is `door`."""
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = door
    _connect(socket, address)


def dial_server(socket: zmq.Socket[bytes], address: str, door: bytes) -> None:
    """Connect to a parameter server."""
    if is_loopback(address):
        _connect(socket, address)
    else:
        dial(socket, address, door)


def _connect(socket: zmq.Socket[bytes], address: str) -> None:
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    socket.connect(address)


def protect(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Before a coordinator binds: let in only who knows its public key."""
    socket.curve_publickey, socket.curve_secretkey = keys
    socket.curve_server = True
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


def protect_server(socket: zmq.Socket[bytes], address: str, keys: Keys) -> None:
    """Likewise before a parameter server binds there."""
    if not is_loopback(address):
        protect(socket, keys)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
