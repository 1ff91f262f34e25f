"""The reader parent: a process that forks the readers of one data set, at the start and after a reader has died.

A worker has threads while it trains, and a fork of a process with threads copies locks but not their holders. So the
worker forks the reader parent before its threads exist. The reader parent has no thread and runs no code of the data
set: each of its forks is as clean as the first. It dies with the worker, and the readers die with it.

`ReaderParent` is the worker's handle; `_live` is the process. It knows nothing of requests and batches.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import select
import signal
import socket
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from distbelief.data.reading import HELD, serve
from distbelief.data.sources import MapStyle
from distbelief.lifeline import die_with_parent, name_process

_LONGEST_MESSAGE = 4096
_PATIENCE_MS = 2000


class ParentDied(Exception):
    """The reader parent is dead, and its readers with it."""


@dataclass(frozen=True)
class Forked:
    """A new reader: its process, and the worker's end of its connection."""

    pid: int
    pidfd: int
    connection: socket.socket


class ReaderParent:
    """Construct it in the main thread, before any other thread starts. Raises OSError if it cannot be forked."""

    def __init__(self, source: MapStyle, seed: int) -> None:
        self._statuses: dict[int, int] = {}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()  # otherwise the child inherits unwritten output and writes it a second time
        sys.stderr.flush()
        # The child starts with this process's handlers; a signal that comes early waits until it has its own.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
        parent = os.getpid()
        try:
            self.pid = _fork()
            if self.pid == 0:
                self._socket.close()
                _become(source, seed, theirs, parent)
        except OSError:
            self._socket.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._socket.close()
            raise

    def fork(self) -> Forked:
        """Fork a reader. Raises OSError if the kernel refuses, and ParentDied."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._send("fork", theirs.fileno())
                answer, descriptors = self._answer("forked", "refused")
            except BaseException:
                ours.close()
                raise
        if answer["kind"] == "refused":
            ours.close()
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        ours.setblocking(False)
        return Forked(answer["pid"], descriptors[0], ours)

    def status(self, pid: int) -> int:
        """The exit status of a reader that has ended; below 0: the signal that killed it. May raise ParentDied."""
        while pid not in self._statuses:
            self._take_exit(self._receive()[0])
        return self._statuses.pop(pid)

    def close(self) -> None:
        """Have every reader killed, and wait until all of them and the reader parent have ended."""
        with suppress(ParentDied):
            self._send("end")
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        if not ended.poll(_PATIENCE_MS):  # it is stopped: its readers die with it
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with suppress(ChildProcessError):  # another part of this process may have reaped it already
            os.waitpid(self.pid, 0)
        os.close(self._pidfd)
        self._socket.close()

    def _send(self, request: str, *descriptors: int) -> None:
        try:
            socket.send_fds(self._socket, [request.encode()], descriptors)
        except (BrokenPipeError, ConnectionResetError):
            raise ParentDied from None

    def _answer(self, *kinds: str) -> tuple[dict[str, Any], list[int]]:
        while True:
            message, descriptors = self._receive()
            if message["kind"] in kinds:
                return message, descriptors
            self._take_exit(message)

    def _take_exit(self, message: dict[str, Any]) -> None:
        self._statuses[message["pid"]] = message["status"]

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _LONGEST_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            raise ParentDied from None
        if not data:
            raise ParentDied
        message: dict[str, Any] = json.loads(data)
        if message["kind"] == "forked" and not descriptors:
            raise OSError("a reader arrived without its descriptor: this process has too many open files (ulimit -n)")
        return message, descriptors


def _fork() -> int:
    """Fork although this process may have other threads; Python 3.12 and later warn about that.

    Threads that libraries have started at their import do no harm: the child takes no lock that another thread could
    hold. Python and glibc reset their own locks in a child (imports, logging, malloc). The child does not use torch's
    thread pool: a reader sets one thread.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This process .* is multi-threaded", category=DeprecationWarning)
        return os.fork()


# --- the process -----------------------------------------------------------------------------------------------------


def _become(source: MapStyle, seed: int, worker: socket.socket, parent: int) -> NoReturn:
    try:
        die_with_parent(parent)
        name_process("reader parent")
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # the worker decides about the end
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
        gc.freeze()  # a collection would write to, and so copy, every page shared with the worker
        _live(source, seed, worker)
    finally:
        os._exit(1)


def _live(source: MapStyle, seed: int, worker: socket.socket) -> NoReturn:
    """Fork readers on request and report their exits."""
    children: dict[int, int] = {}  # pidfd -> process
    events = select.poll()
    events.register(worker, select.POLLIN)
    while True:
        for descriptor, _ in events.poll():
            if descriptor in children:
                events.unregister(descriptor)
                _report_exit(worker, children.pop(descriptor), descriptor)
                continue
            request, connections, _, _ = socket.recv_fds(worker, _LONGEST_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
            if request != b"fork":  # the worker is done with its readers, or is gone
                _end(children)
            if not connections:
                _tell(worker, kind="refused", errno=errno.EMFILE)
                continue
            with socket.socket(fileno=connections[0]) as connection:
                pidfd = _fork_reader(source, seed, worker, connection, children)
            if pidfd >= 0:
                events.register(pidfd, select.POLLIN)


def _fork_reader(
    source: MapStyle, seed: int, worker: socket.socket, connection: socket.socket, children: dict[int, int]
) -> int:
    """Fork one reader and tell the worker. Returns its pidfd, or -1."""
    parent = os.getpid()
    try:
        pid = _fork()
        if pid == 0:
            _become_reader(source, seed, [worker.fileno(), *children], connection, parent)
    except OSError as error:
        _tell(worker, kind="refused", errno=error.errno)
        return -1
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        _tell(worker, kind="refused", errno=error.errno)
        return -1
    children[pidfd] = pid
    _tell(worker, pidfd, kind="forked", pid=pid)
    return pidfd


def _become_reader(
    source: MapStyle, seed: int, not_mine: list[int], connection: socket.socket, parent: int
) -> NoReturn:
    try:
        for descriptor in not_mine:
            os.close(descriptor)
        serve(source, seed, connection, parent)
    finally:
        os._exit(1)


def _report_exit(worker: socket.socket, pid: int, pidfd: int) -> None:
    _, status = os.waitpid(pid, 0)
    os.close(pidfd)
    _tell(worker, kind="exited", pid=pid, status=os.waitstatus_to_exitcode(status))


def _tell(worker: socket.socket, *descriptors: int, **message: Any) -> None:
    socket.send_fds(worker, [json.dumps(message).encode()], descriptors)


def _end(children: dict[int, int]) -> NoReturn:
    for pid in children.values():  # not reaped yet: the process numbers are still valid
        os.kill(pid, signal.SIGKILL)
    for pid in children.values():
        os.waitpid(pid, 0)
    os._exit(0)
