"""A key-value service from outside: `kv.serve`, which starts one, and the connection file, by which clients find it.

`kv.serve` starts the supervisor (supervisor.py) as a process of its own, which starts the servers. The connection file
has the service's secret, so only its owner may read it. No torch here: the supervisor starts without it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from distbelief.atomicfile import replace_file
from distbelief.errors import DistBeliefError, JobError

_ENDS_IN_S = 10.0


@contextlib.contextmanager
def serve(servers: int = 2, *, listen: str = "127.0.0.1", shared_memory: bool = True) -> Iterator[str]:
    """Start a key-value service, which ends with the `with` block. Yields the path of the connection file, for
    `kv.connect`. It holds the service's secret, and only its owner can read it. With `listen`, an address of this
    machine (HOST or HOST:PORT), clients on other machines can connect too: copy the file to them.

        with kv.serve(servers=2) as address:
            store = kv.connect(address)  # here, or in any other process
    """
    if servers < 1:
        raise DistBeliefError(f"a key-value service cannot have {servers} servers", hint="1 or more")
    address = endpoint(listen)
    folder = Path(tempfile.mkdtemp(prefix="distbelief-kv-"))
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "distbelief.kv"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for this process, which then ends the service
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            options = {"folder": str(folder), "servers": servers, "listen": address, "shares": shared_memory}
            process.stdin.write(json.dumps(options).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
            answer = json.loads(line) if line else {"error": "the key-value service ended before it could serve"}
            if "error" in answer:
                raise DistBeliefError(answer["error"], hint=answer.get("hint", ""), details=answer.get("details", ""))
            yield str(answer["file"])
        finally:
            process.stdin.close()  # the supervisor ends the service at the end of its standard input
            try:
                process.wait(_ENDS_IN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


CONNECTION_FILE = "kv.json"


class Connection(Struct, frozen=True):
    """The content of a connection file."""

    address: str
    secret: str
    boot: str
    """The machine and its boot (`this_boot`): clients on the same machine can share memory with the servers."""
    segment_socket: str
    """The Unix socket that hands out shared memory; empty: the bytes of values always travel."""


def endpoint(listen: str) -> str:
    """The ZeroMQ endpoint for an address to listen on.

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
    """An identifier of this machine and its current boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def write_connection_file(path: Path, content: Connection) -> None:
    try:
        replace_file(path, msgspec.json.encode(content), private=True)
    except OSError as error:
        raise DistBeliefError(
            f"cannot write {path}: {error.strerror or error}", hint="name a folder that you can write to"
        ) from error


def read_connection_file(path: Path) -> Connection:
    hint = "give the path that `distbelief kv` printed, or what kv.serve() gave; is the service running?"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Connection)
    except OSError as error:
        raise DistBeliefError(f"cannot read {path}: {error.strerror or error}", hint=hint) from error
    except msgspec.MsgspecError as error:
        raise DistBeliefError(f"{path} is no connection file of a key-value service", hint=hint) from error
