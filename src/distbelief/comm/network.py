"""Reaching a coordinator: plainly on loopback, encrypted and authenticated (CURVE) everywhere else.

The server's key pair follows from the run's secret: whoever knows the secret can check whom it talks to and be let in,
whoever does not cannot even shake hands.
"""

from __future__ import annotations

import hashlib
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def host_of(address: str) -> str:
    """
    >>> host_of("tcp://10.0.0.1:5555"), host_of("tcp://[::1]:*")
    ('10.0.0.1', '::1')
    """
    netloc = urlsplit(address).netloc
    return netloc.rpartition(":")[0].strip("[]")


def is_loopback(address: str) -> bool:
    return host_of(address) in LOOPBACK


def dial(socket: zmq.Socket[bytes], address: str, secret: bytes) -> None:
    """Connect to the coordinator of the run with this secret."""
    if not is_loopback(address):
        server, _ = _server_keys(secret)
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = server
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    socket.connect(address)


def protect(socket: zmq.Socket[bytes], address: str, secret: bytes) -> None:
    """Before a coordinator binds: let in only who knows the secret, unless only this machine can come at all."""
    if not is_loopback(address):
        socket.curve_publickey, socket.curve_secretkey = _server_keys(secret)
        socket.curve_server = True


def _server_keys(secret: bytes) -> tuple[bytes, bytes]:
    """(public, private)"""
    private = z85.encode(hashlib.blake2b(secret, digest_size=32, person=b"distbelief-curve").digest())
    return zmq.curve_public(private), private
