"""Workers that a user starts by hand on the run's own host: admitted, watched and ended by the launching process.

They connect to a socket in the run directory, which only the directory's owner can open, and send the run's secret. The
kernel says which process is at the other end (its number, and a pidfd that becomes readable when the process ends).
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
_PATIENCE_S = 2.0  # how long a worker may take to introduce itself; the launching process waits meanwhile
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
        self._path.unlink(
            missing_ok=True
        )  # of a killed launching process: our coordinator holds the journal's lock, so it is dead
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with short_path(run_dir) as folder:  # the kernel limits socket paths to about 100 characters
            before = os.umask(0o077)
            try:
                self.listener.bind(f"{folder}/{SOCKET}")
            finally:
                os.umask(before)
        self.listener.listen()

    def accept(self, spec: Callable[[int], WorkerSpec]) -> ManualWorker | None:
        """Admit the next worker and send its specification. None: it had the wrong secret, or is gone again."""
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
        """The worker has ended. Only its parent knows its exit status; SIGKILL stands for it."""
        os.close(self._there.pop(worker.pid).pidfd)
        return -signal.SIGKILL

    def kill(self, pid: int) -> bool:
        """Kill a manually started worker. Returns whether the process is one."""
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
    """A short path to the folder, valid inside the `with` block."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
