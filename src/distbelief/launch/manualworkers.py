"""Workers that a user starts by hand on the run's own host: admitted, watched and ended by the launching process.

They connect to a socket in the run directory, which only the directory's owner can open, and send the run's secret. A
file system without sockets (CIFS, gcsfuse) is served by a folder of the owner's in the machine's temporary one. The
kernel says which process is at the other end (its number, and a pidfd that becomes readable when the process ends).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import signal
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from distbelief.errors import DistBeliefError
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
        self._there: dict[int, ManualWorker] = {}
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._path = self._bind_in(run_dir)
        except OSError:
            local = local_folder(secret)
            local.mkdir(mode=0o700, exist_ok=True)
            _require_ours(local)
            self._path = self._bind_in(local)
        self.listener.listen()

    def _bind_in(self, folder: Path) -> Path:
        path = folder / SOCKET
        # Of a killed launching process: our coordinator holds the journal's lock, so it is dead.
        path.unlink(missing_ok=True)
        with short_path(folder) as short:  # the kernel limits socket paths to about 100 characters
            before = os.umask(0o077)
            try:
                self.listener.bind(f"{short}/{SOCKET}")
            finally:
                os.umask(before)
        return path

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
        if self._path.parent == local_folder(self._secret):
            self._path.parent.rmdir()
        for worker in self._there.values():
            os.close(worker.pidfd)


def local_folder(secret: bytes) -> Path:
    """Where the socket is if it cannot be in the run directory. Its name follows from the secret."""
    return Path(tempfile.gettempdir()) / f"distbelief-{hashlib.blake2b(secret, digest_size=12).hexdigest()}"


def _require_ours(folder: Path) -> None:
    there = folder.lstat()
    if there.st_uid != os.getuid() or there.st_mode & 0o077 or folder.is_symlink():
        raise DistBeliefError(f"{folder} belongs to another user, or others can read it", hint="remove it")


@contextlib.contextmanager
def connected(run_dir: Path, secret: bytes) -> Iterator[socket.socket]:
    """A connection to the launching process of that run. Raises an OSError if it is not there."""
    folder = run_dir if (run_dir / SOCKET).exists() else local_folder(secret)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as engine:
        if folder != run_dir:
            _require_ours(folder)
        with short_path(folder) as short:
            engine.connect(f"{short}/{SOCKET}")
        yield engine


@contextlib.contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """A short path to the folder, valid inside the `with` block."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
