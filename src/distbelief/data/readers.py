"""Reader processes: a data set's code runs in forked children, never in the training process.

So reading overlaps with compute, and cannot affect the training process's random numbers, threads or memory. Every
sample is read under a seed that is a pure function of (seed, epoch, sample), so a batch has the same values no matter
which reader makes it, or when. This module is the training process's half: it distributes requests, keeps answers by
key, and reports failures of readers. `data.reading` is the child's half. Neither half knows of steps or shards.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from distbelief.data.parcel import post, receive
from distbelief.data.reading import HELD, Failure, Request, listed, serve
from distbelief.data.sources import MapStyle, Samples
from distbelief.errors import DistBeliefError

Key = tuple[int, int]

_IN_HAND = 2  # requests per reader: one in work and one waiting, so that the reader never idles
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}


class ReaderError(DistBeliefError):
    """The data set's code raised an exception (`details` has its traceback) or ended its reader process."""


@dataclass
class _Order:
    key: Key
    request: Request
    wanted: bool = True


@dataclass
class _Reader:
    pid: int
    pidfd: int
    connection: socket.socket
    in_hand: deque[_Order] = field(default_factory=deque)
    """Requests in the order of their answers; a reader answers one after the other."""


class Readers:
    """Reader processes for one data set, forked by the constructor and killed by `close`.

    Create it in the main thread, before any other thread starts: a fork copies locks but not the threads that hold
    them, and a reader dies with the thread that created it.

    >>> import numpy as np
    >>> from distbelief.data.sources import as_source
    >>> with Readers(as_source([10, 20, 30]), seed=0, processes=1) as readers:
    ...     readers.request((0, 0), epoch=0, samples=np.array([2, 0]))
    ...     readers.take((0, 0))
    tensor([30, 10])
    """

    def __init__(self, source: MapStyle, seed: int, processes: int) -> None:
        if processes < 1:
            raise ValueError(f"at least one reader process is needed, not {processes}")
        self._owner = os.getpid()
        self._readers: list[_Reader] = []
        self._waiting: OrderedDict[Key, _Order] = OrderedDict()
        self._finished: dict[Key, Any] = {}
        self._poll = select.poll()
        self._by_descriptor: dict[int, _Reader] = {}
        self._dead: ReaderError | None = None
        try:
            for _ in range(processes):
                self._start(source, seed)
        except OSError as error:
            self.close()
            raise ReaderError(f"a reader process could not be started: {error}") from error

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [reader.pid for reader in self._readers]

    def request(self, key: Key, epoch: int, samples: Samples, collated: bool = True) -> None:
        """Request a batch, or a list of samples, for a later `take`. Does not wait. Repeating a request for the same
        key has no effect."""
        if len(samples) == 0:
            raise ValueError(f"the request {key} has no samples")
        if not self._knows(key):
            self._waiting[key] = _Order(key, Request(epoch, samples, collated))
        self._collect(0)

    def take(self, key: Key, timeout_s: float | None = None) -> Any:
        """Return a requested batch; wait until it arrives. Raises TimeoutError after `timeout_s`; the caller may then
        call again. The batch is handed over: a second `take` needs a second `request`. After a reader has died, every
        `take` raises its error."""
        if self._dead is not None:
            raise self._dead
        if not self._knows(key):
            raise KeyError(f"{key} was not requested")
        if key in self._waiting:
            self._waiting.move_to_end(key, last=False)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        self._collect(0)
        while key not in self._finished and self._dead is None:
            left_ms = None if end is None else max(0, round((end - time.monotonic()) * 1000))
            if left_ms == 0:
                raise TimeoutError(f"the batch {key} was not ready after {timeout_s} s")
            self._collect(left_ms)
        if self._dead is not None:
            raise self._dead
        answer = self._finished.pop(key)
        if isinstance(answer, Failure):
            raise ReaderError(
                answer.message,
                hint="the traceback is the data set's own; it ran in a reader process",
                details=answer.traceback,
            )
        return answer

    def forget(self, keep: Callable[[Key], bool]) -> None:
        """Drop every request and answer whose key `keep` rejects."""
        self._waiting = OrderedDict((key, order) for key, order in self._waiting.items() if keep(key))
        self._finished = {key: answer for key, answer in self._finished.items() if keep(key)}
        for reader in self._readers:
            for order in reader.in_hand:
                order.wanted = order.wanted and keep(order.key)
        self._collect(0)

    def close(self) -> None:
        """Kill the readers and wait until they have ended. May be called twice; in a forked copy of this object it does
        nothing."""
        if os.getpid() != self._owner:
            return
        for reader in self._readers:
            signal.pidfd_send_signal(reader.pidfd, signal.SIGKILL)
        while self._readers:
            self._release(self._readers[-1])
        self._waiting.clear()
        self._finished.clear()

    def _start(self, source: MapStyle, seed: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()  # otherwise the child inherits unwritten output and writes it a second time
        sys.stderr.flush()
        # The child starts with this process's handlers; a signal that comes early waits until it has its own.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
        try:
            pid = _fork()
            if pid == 0:
                self._become_reader(source, seed, theirs, [ours, *(reader.connection for reader in self._readers)])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        ours.setblocking(False)
        try:
            reader = _Reader(pid, os.pidfd_open(pid), ours)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            _reap(pid)
            raise
        self._readers.append(reader)
        # The pidfd as well as the connection: a grandchild of the reader may keep the connection open after its death.
        for descriptor in (reader.pidfd, ours.fileno()):
            self._by_descriptor[descriptor] = reader
            self._poll.register(descriptor, select.POLLIN)

    def _become_reader(
        self, source: MapStyle, seed: int, connection: socket.socket, not_mine: list[socket.socket]
    ) -> NoReturn:
        try:
            for other in not_mine:
                other.close()
            serve(source, seed, connection, parent=self._owner)
        finally:
            os._exit(1)

    def _knows(self, key: Key) -> bool:
        in_hand = any(order.key == key and order.wanted for reader in self._readers for order in reader.in_hand)
        return in_hand or key in self._waiting or key in self._finished

    def _collect(self, timeout_ms: int | None) -> None:
        """Receive the readers' answers for at most this time; then send waiting requests to readers with free
        places."""
        self._share_out()
        touched = {id(self._by_descriptor[fd]): self._by_descriptor[fd] for fd, _ in self._poll.poll(timeout_ms)}
        for reader in touched.values():
            if not self._drain(reader) or _has_exited(reader):
                # Once more: it may have answered after the last look and before its end, and that answer counts.
                self._drain(reader)
                self._report_death(reader)
        self._share_out()

    def _share_out(self) -> None:
        while self._waiting and self._dead is None:
            reader = min(self._readers, key=lambda reader: len(reader.in_hand))
            if len(reader.in_hand) >= _IN_HAND:
                return
            _, order = self._waiting.popitem(last=False)
            reader.in_hand.append(order)
            try:
                post(reader.connection, order.request)
            except (BrokenPipeError, ConnectionResetError):
                return  # the reader is dead; the next look at its pidfd reports how

    def _drain(self, reader: _Reader) -> bool:
        """Read all answers that have arrived. False: the connection is closed."""
        while True:
            answer: Any
            try:
                answer = receive(reader.connection)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                # reported once, when the reader died with an unread request; its earlier answers can still be read
                continue
            except EOFError:
                return False
            except Exception as error:
                answer = Failure(f"a batch could not be unpacked: {type(error).__name__}: {error}", "")
            order = reader.in_hand.popleft()
            if order.wanted:
                self._finished[order.key] = answer

    def _report_death(self, reader: _Reader) -> None:
        if not _has_exited(reader, wait_ms=2000):
            signal.pidfd_send_signal(reader.pidfd, signal.SIGKILL)
            ended, hint = "closed its connection", "the data set's code must not close files that it did not open"
        else:
            ended, hint = _cause_of_death(reader.pid)
        doing = f"while reading {listed(reader.in_hand[0].request.samples)}" if reader.in_hand else "while idle"
        self._dead = self._dead or ReaderError(f"reader process {reader.pid} {ended} {doing}", hint=hint)
        self._release(reader)

    def _release(self, reader: _Reader) -> None:
        self._readers.remove(reader)
        for descriptor in (reader.pidfd, reader.connection.fileno()):
            self._poll.unregister(descriptor)
            del self._by_descriptor[descriptor]
        reader.connection.close()
        _reap(reader.pid)
        os.close(reader.pidfd)


def _fork() -> int:
    """Fork although this process may have other threads; Python 3.12 and later warn about that.

    It is safe because the child takes no lock that another thread could hold. Python and glibc reset their own locks in
    a child (imports, logging, malloc). The child does not use torch's thread pool: `serve` sets one thread. The
    worker's other threads send heartbeats and save checkpoints; the child does neither. It runs the data set's code and
    writes to its own socket.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This process .* is multi-threaded", category=DeprecationWarning)
        return os.fork()


def _has_exited(reader: _Reader, wait_ms: int = 0) -> bool:
    exits = select.poll()
    exits.register(reader.pidfd, select.POLLIN)
    return bool(exits.poll(wait_ms))


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):  # another part of this process may have reaped the child already
        os.waitpid(pid, 0)


def _cause_of_death(pid: int) -> tuple[str, str]:
    """(cause of the process's end, hint), as text. Does not reap the process."""
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        result = None
    if result is None:
        return "ended", "its exit status is not known: something else in this process waits for children"
    if result.si_code == os.CLD_EXITED:
        return f"exited with status {result.si_status}", "the data set's code ended its own process (os._exit?)"
    killer = signal.Signals(result.si_status)
    if killer in _CRASHES:
        hint = "native code that the data set calls has crashed; read these samples alone to find which one"
    elif killer == signal.SIGKILL:
        hint = "a user killed it, or the kernel did when memory ran out (see dmesg); fewer `readers` take less memory"
    else:
        hint = "some other process sent this signal"
    return f"was killed by {killer.name}", hint
