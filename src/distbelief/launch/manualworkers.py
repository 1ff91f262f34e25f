"""Workers that somebody starts by hand beside the engine's own: let in, watched and ended by the engine all the same.

They come over a socket in the run directory that only its owner can open, and show the run's secret. The process at
the other end is known from the kernel (its number, and a descriptor that says when it is gone), not from its words.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from distbelief.transport.shm.memfd import receive_message, send_message
from distbelief.worker.spec import WorkerSpec

SOCKET = "join.sock"
_PATIENCE_S = 2.0  # for a worker to say who it is; the engine waits no longer for anybody
_CREDENTIALS = struct.Struct("3i")


class _Hello(msgspec.Struct, frozen=True):
    worker: int
    secret: str


@dataclass(frozen=True)
class ManualWorker:
    worker: int
    pid: int
    pidfd: int
    connection: socket.socket


class ManualWorkers:
    def __init__(self, run_dir: Path, secret: bytes) -> None:
        self._secret = secret
        self._path = run_dir / SOCKET
        self._there: dict[int, ManualWorker] = {}
        self._path.unlink(missing_ok=True)  # a killed engine's: our coordinator has the journal's lock, so it is dead
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with short_path(run_dir) as folder:  # the kernel takes about 100 characters
            before = os.umask(0o077)
            try:
                self.listener.bind(f"{folder}/{SOCKET}")
            finally:
                os.umask(before)
        self.listener.listen()

    def accept(self, spec: Callable[[int], WorkerSpec]) -> ManualWorker | None:
        """Let the next one in and tell it what to do; None when it is a stranger, or gone again."""
        connection, _ = self.listener.accept()
        connection.settimeout(_PATIENCE_S)
        try:
            hello = msgspec.convert(receive_message(connection)[0], _Hello)
            if not hmac.compare_digest(bytes.fromhex(hello.secret), self._secret):
                raise ValueError("not the secret of this run")
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, _, _ = _CREDENTIALS.unpack(raw)
            pidfd = os.pidfd_open(pid)
            send_message(connection, {"spec": msgspec.to_builtins(spec(hello.worker))})
        except (OSError, EOFError, ValueError):
            connection.close()
            return None
        connection.settimeout(None)
        self._there[pid] = ManualWorker(hello.worker, pid, pidfd, connection)
        return self._there[pid]

    def departed(self, worker: ManualWorker) -> int:
        """It is gone. Its status is its parent's to know; a signal stands for it: it left without a word to us."""
        os.close(self._there.pop(worker.pid).pidfd)
        return -signal.SIGKILL

    def kill(self, pid: int) -> bool:
        """End a worker; whether it is one."""
        if pid not in self._there:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._there[pid].pidfd, signal.SIGKILL)
        return True

    def close(self) -> None:
        self.listener.close()
        self._path.unlink(missing_ok=True)
        for worker in self._there.values():
            os.close(worker.pidfd)


@contextlib.contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """A path of a few characters to a folder with any path, while this lasts."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
