"""The file by which clients find a key-value service. It has the service's secret, so only its owner may read it."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from distbelief.atomicfile import replace_file
from distbelief.errors import DistBeliefError, JobError

FILE = "kv.json"


class Connection(Struct, frozen=True):
    address: str
    secret: str
    boot: str
    """Of the machine: there, clients and servers can share memory."""
    keeper: str
    """The socket of the process that keeps it; empty: values always travel."""


def endpoint(listen: str) -> str:
    """
    >>> endpoint("127.0.0.1"), endpoint("10.0.0.1:5000"), endpoint("[fd00::1]:5000")
    ('tcp://127.0.0.1:*', 'tcp://10.0.0.1:5000', 'tcp://[fd00::1]:5000')
    """
    host, bracket, rest = listen.partition("]") if listen.startswith("[") else ("", "", listen)
    name, _, port = rest.partition(":")
    if bool(bracket) == bool(name) or (host and not bracket) or not (port.isdigit() or not port):
        raise JobError(f"{listen!r} is no address to listen on", hint="HOST or HOST:PORT, for example 10.0.0.1:5000")
    if host + name in ("0.0.0.0", "[::", "*"):
        raise JobError(
            f"a key-value service cannot listen on {listen}: its servers need one address to be reached at",
            hint="name the address of the network card, for example 10.0.0.1:5000",
        )
    return f"tcp://{host}{bracket}{name}:{port or '*'}"


def this_boot() -> str:
    """What tells a machine, between two starts of it, from all others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def write(path: Path, content: Connection) -> None:
    try:
        replace_file(path, msgspec.json.encode(content), private=True)
    except OSError as error:
        raise DistBeliefError(
            f"cannot write {path}: {error.strerror or error}", hint="name a folder that you can write to"
        ) from error


def read(path: Path) -> Connection:
    hint = "give the path that `distbelief kv` printed, or what kv.serve() gave; is the service running?"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Connection)
    except OSError as error:
        raise DistBeliefError(f"cannot read {path}: {error.strerror or error}", hint=hint) from error
    except msgspec.MsgspecError as error:
        raise DistBeliefError(f"{path} is no connection file of a key-value service", hint=hint) from error
