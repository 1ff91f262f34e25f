"""The processes of a run on this machine: the zygote, its forks, and the coordinator. Starts, reads and ends them.

This module decides nothing; the coordinator does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from distbelief.control.credentials import Credential
from distbelief.controlgroups import why_fork_failed
from distbelief.errors import DistBeliefError, JobError, RunFailed
from distbelief.strategies import parse
from distbelief.transport.shm.memfd import receive_message, send_message
from distbelief.worker.spec import WorkerSpec

_LONGEST_LINE = 1 << 16
_SHOWN = 1000
"""Bytes of a longer line that are shown."""
_LAST_READS = 64  # of 64 KiB each: what a pipe can hold, and some more

LogLine = Callable[[str, str], None]

WORKER_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # numpy's thread pool would start a thread in the zygote before it forks
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # at a member's death gloo would print pages of C++ frames
}

_MALLOC = ("hugetlb=1", f"mmap_threshold={32 << 20}", f"trim_threshold={256 << 20}")
"""glibc asks for huge pages, and keeps freed memory for the next step; very large blocks go back (docs/log.md)."""


def zygote_environment(strategy: str, own: Mapping[str, str]) -> dict[str, str]:
    """The environment of the zygote. `own`: this process's; variables that the user has set there stay.

    >>> "GLIBC_TUNABLES" in zygote_environment("sharded", {})
    False
    >>> zygote_environment("ps:sync", {"GLIBC_TUNABLES": "glibc.malloc.check=3"})["GLIBC_TUNABLES"]
    'glibc.malloc.check=3'
    """
    memory = {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{setting}" for setting in _MALLOC)}
    wanted = memory if parse(strategy).keeps_freed_memory else {}
    hashes = {"PYTHONHASHSEED": "0"}  # every process iterates over a set in the same order
    return hashes | wanted | dict(own) | WORKER_ENVIRONMENT


class NotStarted(RunFailed):
    """A process could not be started; the message says which limit was reached."""


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Around the start of a process: a refusal of the kernel becomes an error that names the process and the limit."""
    try:
        yield
    except OSError as error:
        raise NotStarted(f"{what} could not be started: {why_fork_failed(error)}", hint="raise that limit") from error


class LogPipe:
    """The output of a process: each line goes to its log file and to `show`."""

    def __init__(self, source: str, path: Path, show: LogLine) -> None:
        self._source = source
        self._path = path
        self._file: FileIO | None = None
        self._is_long = False
        """Whether the next piece continues a line of which the beginning was shown."""
        self._show = show
        self._rest = b""
        self._lost_bytes = 0
        """What the log file lacks since the disk is full."""
        self._is_closed = False
        self.read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read_fd, False)

    def close_write(self) -> None:
        """Close our copy of the writing end, so that the pipe ends with the process."""
        os.close(self.write_fd)

    def pump(self) -> bool:
        """Forward one piece of output; a worker that prints without end must not block the poll loop. Returns False at
        the end of the pipe."""
        try:
            data = os.read(self.read_fd, 65536)
        except BlockingIOError:
            return True
        if data:
            self._keep(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._show_line(line)
                self._is_long = False
            if len(self._rest) > _LONGEST_LINE:
                self._show_line(self._rest)
                self._rest, self._is_long = b"", True
            return True
        if self._rest:
            self._show_line(self._rest)
            self._rest = b""
        return False

    def _keep(self, data: bytes) -> None:
        """Write to the log file, as far as the disk has room: a full one ends no run."""
        try:
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
            if self._lost_bytes:
                self._file.write(f"\n... {self._lost_bytes} bytes are missing: the disk was full\n".encode())
                self._lost_bytes = 0
            while data:  # a disk that becomes full may take a part
                data = data[self._file.write(data) :]
        except OSError as error:
            if not self._lost_bytes:
                self._show(self._source, f"its log {self._path} cannot be written: {error.strerror}")
            self._lost_bytes += len(data)

    def _show_line(self, line: bytes) -> None:
        """Show a line, or a piece of a long one. Of a long line only the beginning is shown, and every piece of a
        progress bar, which returns the carriage; its log has the whole."""
        if b"\r" in line or (len(line) <= _LONGEST_LINE and not self._is_long):
            self._show(self._source, line.decode(errors="replace"))
        elif not self._is_long:
            beginning = line[:_SHOWN].decode(errors="replace")
            self._show(self._source, f"{beginning} … a long line is cut; the whole is in logs/{self._path.name}")

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for _ in range(_LAST_READS):
            if not self.pump():
                break
        os.close(self.read_fd)
        if self._file is not None:
            self._file.close()


class CoordinatorProcess:
    """`python -m distbelief.coordinator`. It gets its order over stdin, and ends when stdin is closed."""

    def __init__(self, order: dict[str, Any], log: LogPipe) -> None:
        """`order`: run_dir, secret, config, and where to listen (see coordinator/__main__.py)."""
        self.started_at = time.monotonic()
        self._has_answered = False
        try:
            with _named("the coordinator"):
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "distbelief.coordinator"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log.write_fd,
                    start_new_session=True,  # the launching process handles the terminal's signals
                )
        finally:
            log.close_write()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already, which `ended` says
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def address(self) -> str:
        """The coordinator's address; waits until the coordinator reports it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self._has_answered = True
        answer = json.loads(line) if line else {"error": "the coordinator ended before it could serve"}
        if "error" in answer:
            raise DistBeliefError(answer["error"], hint=answer.get("hint", "see logs/coordinator.log"))
        return str(answer["address"])

    def serves(self) -> bool:
        """Whether the coordinator has started. It replays its journal first, and waits for room on a full disk."""
        assert self._process.stdout is not None
        return self._has_answered or bool(select.select([self._process.stdout], [], [], 0)[0])

    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended the coordinator: a user or the out-of-memory killer sent it."""
        return self._process.poll() == -signal.SIGKILL

    def kill(self) -> None:
        self._process.kill()

    def close(self, timeout_s: float = 3.0) -> None:
        """The coordinator ends by itself after the run, or when its stdin is closed; after the timeout it is killed."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with contextlib.suppress(BrokenPipeError):  # the order of a process that died at once
                    stream.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Zygote:
    """The launching process's handle on the zygote (zygote.py)."""

    def __init__(self, log: LogPipe, strategy: str) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.early_exits: list[dict[str, Any]] = []
        """Exits that the zygote reported while a fork was pending."""
        command = ["-m", "distbelief.launch.zygote", str(theirs.fileno()), str(os.getpid()), strategy]
        with _named("the process that starts workers"):
            self._process = subprocess.Popen(
                [sys.executable, "-P", *command],
                pass_fds=[theirs.fileno()],
                env=zygote_environment(strategy, os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log.write_fd,
                stderr=log.write_fd,
                start_new_session=True,
            )
        log.close_write()
        theirs.close()

    def wait_ready(self) -> None:
        """Raises JobError if the strategy cannot be used on this host."""
        try:
            answer, _ = receive_message(self.socket)
        except EOFError:
            raise RunFailed("the process that starts workers ended at once", hint="see logs/zygote.log") from None
        if answer["event"] == "failed":
            raise JobError(answer["message"], hint=answer["hint"], details=answer["details"])

    def fork_worker(self, spec: WorkerSpec, log: LogPipe) -> tuple[int, socket.socket]:
        """Fork a worker. Returns its process number and our end of its socket to the segment server."""
        return self._fork({"do": "worker", "id": spec.worker, "spec": msgspec.to_builtins(spec)}, log)

    def fork_server(self, spec: WorkerSpec, log: LogPipe) -> tuple[int, socket.socket]:
        """Fork a parameter server. Returns the same as `fork_worker`."""
        return self._fork({"do": "server", "id": spec.worker, "spec": msgspec.to_builtins(spec)}, log)

    def fork_entry(self, number: int, module: str, spec: dict[str, Any], log: LogPipe) -> tuple[int, socket.socket]:
        """Fork a process that calls the module's `run(spec, socket)`."""
        return self._fork({"do": "entry", "id": number, "module": module, "spec": spec}, log)

    def fork_store(self, host: str, port: int, credential: Credential, log: LogPipe) -> tuple[int, int]:
        """Fork the server of torch's rendezvous store. Returns its process number and its port: the wanted port if it
        is free (0: any)."""
        request = {"do": "store", "id": -1, "host": host, "port": port, "credential": msgspec.to_builtins(credential)}
        try:
            pid, sock = self._fork(request, log)
        except NotStarted as error:
            raise RunFailed(f"the store of gloo's addresses could not be started: {error.message}") from error
        with sock:
            try:
                return pid, int(receive_message(sock)[0]["port"])
            except EOFError:
                raise RunFailed("the store of gloo's addresses ended at once", hint="see logs/store.log") from None

    def _fork(self, request: dict[str, Any], log: LogPipe) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                send_message(self.socket, request, [theirs.fileno(), log.write_fd])
                answer = self._fork_answer()
            except (EOFError, ConnectionError):
                answer = {"event": "refused", "why": "the process that starts workers is dead"}
            if answer["event"] == "refused":
                ours.close()
                os.write(log.write_fd, f"it could not be started: {answer['why']}\n".encode())
            log.close_write()
        if answer["event"] == "refused":
            raise NotStarted(answer["why"])
        return int(answer["pid"]), ours

    def _fork_answer(self) -> dict[str, Any]:
        while True:
            answer, _ = receive_message(self.socket)
            if answer["event"] in ("started", "refused"):
                return answer
            self.early_exits.append(answer)

    def kill(self, pid: int) -> None:
        with contextlib.suppress(ConnectionError):  # the zygote is dead, and so is every process that it has forked
            send_message(self.socket, {"do": "kill", "pid": pid})

    def close(self) -> None:
        self.socket.close()
        try:
            self._process.wait(3)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
