"""Reader processes: a data set's code runs in forked children, never in the training process.

So reading overlaps with compute, and cannot affect the training process's random numbers, threads or memory. Every
sample is read under a seed that is a pure function of (seed, epoch, sample), so a batch has the same values no matter
which reader makes it, or when. For the same reason a dead reader does no harm: another one is forked, and reads again
what the dead one had not answered.

This module is the training process's half: it distributes requests, keeps answers by key, and replaces dead readers.
`data.reading` is the reader's half, and `data.readerparent` forks readers. None of them knows of steps or shards.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distbelief.controlgroups import why_fork_failed
from distbelief.data.parcel import post, receive
from distbelief.data.readerparent import ParentDied, ReaderParent
from distbelief.data.reading import Begun, Failure, Request, listed
from distbelief.data.rules.readerdeaths import Deaths, Forks
from distbelief.data.sources import MapStyle, Samples
from distbelief.errors import DistBeliefError

Key = tuple[int, int]

_IN_HAND = 2  # requests per reader: one in work and one waiting, so that the reader never idles
_KILLED = "a user killed it, or the kernel did when memory ran out (see dmesg); fewer `readers` take less memory"
_FEWER = "raise the limit, or use fewer workers, or fewer `readers` in the job"
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}


class ReaderError(DistBeliefError):
    """The data set's code raised an exception (`details` has its traceback), or ends every reader process."""


class ReadersLost(ReaderError):
    """No reader is left and none can be forked. That is no error of the job; another worker takes this one's place."""


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
    has_begun: bool = False
    """Whether it reads the first of them. A reader may be killed, and dead, before its request reaches it."""


class Readers:
    """Reader processes for one data set, forked by the constructor and killed by `close`.

    Create it in the main thread, before any other thread starts: a fork copies locks but not the threads that hold
    them, and readers die with the thread that created them.

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
        self.processes = processes
        self._data_set = type(source.dataset).__name__
        self._readers: list[_Reader] = []
        self._waiting: OrderedDict[Key, _Order] = OrderedDict()
        self._finished: dict[Key, Any] = {}
        self._poll = select.poll()
        self._by_descriptor: dict[int, _Reader] = {}
        self._deaths = Deaths()
        self._forks = Forks()
        self._dead: ReaderError | None = None
        self._closed = False
        try:
            self._parent = ReaderParent(source, seed)
        except OSError as error:
            raise ReaderError(f"no reader process could be started: {why_fork_failed(error)}", hint=_FEWER) from error
        self._replace()

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
        call again. The batch is handed over: a second `take` needs a second `request`. When readers die again and
        again, every later `take` raises that error."""
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
        if self._deaths.samples:
            in_hand = (order for reader in self._readers for order in reader.in_hand if order.wanted)
            left = (order.request.samples.tolist() for order in (*self._waiting.values(), *in_hand))
            self._deaths = self._deaths.only(itertools.chain.from_iterable(left))
        self._collect(0)

    def begin_anew(self) -> None:
        """End the reader that the last answer came from, and fork another one: the next request goes to a reader that
        has read nothing. All answers must have been taken."""
        if any(reader.in_hand for reader in self._readers):
            raise ValueError("a reader is at work")
        if self._readers:
            first = self._readers[0]  # of idle readers the first one is asked
            # Closing the connection would not end it: processes that were forked meanwhile hold the connection too.
            with suppress(ProcessLookupError):  # it is dead already
                signal.pidfd_send_signal(first.pidfd, signal.SIGKILL)
            try:
                self._parent.status(first.pid)
            except ParentDied:
                self._lost()
            self._release(first)
        self._replace()

    def close(self) -> None:
        """Kill the readers and wait until they have ended. May be called twice; in a forked copy of this object it does
        nothing."""
        if os.getpid() != self._owner:
            return
        if self._closed:
            return
        self._closed = True
        self._parent.close()
        for reader in list(self._readers):
            self._release(reader)
        self._waiting.clear()
        self._finished.clear()

    def _replace(self) -> None:
        """Fork the readers that are missing, unless the last attempt has failed a moment ago."""
        while len(self._readers) < self.processes and self._dead is None and self._forks.is_due(time.monotonic()):
            try:
                forked = self._parent.fork()
            except ParentDied:
                self._lost()
            except OSError as error:
                self._forks = self._forks.failed(time.monotonic())
                why = why_fork_failed(error)
                if self._forks.too_many and not self._readers:
                    self._dead = ReadersLost(f"no reader process could be started: {why}", hint=_FEWER)
                elif self._forks.failures == 1:
                    _log(f"a reader process could not be started: {why}; it is tried again")
            else:
                self._forks = Forks()
                self._adopt(_Reader(forked.pid, forked.pidfd, forked.connection))

    def _adopt(self, reader: _Reader) -> None:
        self._readers.append(reader)
        # The pidfd as well as the connection: a grandchild of the reader may keep the connection open after its death.
        for descriptor in (reader.pidfd, reader.connection.fileno()):
            self._by_descriptor[descriptor] = reader
            self._poll.register(descriptor, select.POLLIN)

    def _knows(self, key: Key) -> bool:
        in_hand = any(order.key == key and order.wanted for reader in self._readers for order in reader.in_hand)
        return in_hand or key in self._waiting or key in self._finished

    def _collect(self, timeout_ms: int | None) -> None:
        """Receive the readers' answers for at most this time; replace dead readers; then send waiting requests to
        readers with free places."""
        self._replace()
        self._share_out()
        if not self._readers:  # the next attempt to fork one is due soon
            pause_ms = max(0, round((self._forks.next_at - time.monotonic()) * 1000)) + 1
            timeout_ms = pause_ms if timeout_ms is None else min(timeout_ms, pause_ms)
        touched = {id(self._by_descriptor[fd]): self._by_descriptor[fd] for fd, _ in self._poll.poll(timeout_ms)}
        for reader in touched.values():
            if not self._drain(reader) or _has_exited(reader):
                # Once more: it may have answered after the last look and before its end, and that answer counts.
                self._drain(reader)
                self._died(reader)
        self._replace()
        self._share_out()

    def _share_out(self) -> None:
        while self._waiting and self._readers and self._dead is None:
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
            if isinstance(answer, Begun):
                reader.has_begun = True
                continue
            order = reader.in_hand.popleft()
            reader.has_begun = False
            self._deaths = self._deaths.answered(order.request.samples)
            if order.wanted:
                self._finished[order.key] = answer

    def _died(self, reader: _Reader) -> None:
        """Have a dead reader's requests read again; or give up, if another reader would die too."""
        try:
            ended, hint = self._cause_of_death(reader)
        except ParentDied:
            self._lost()
            return
        reading = reader.in_hand[0].request.samples if reader.has_begun else np.empty(0, np.int64)
        twice: list[int] = []
        if not reader.has_begun or reader.in_hand[0].wanted:  # a request that was dropped is not read again
            twice = self._deaths.killed_before(reading.tolist())
            self._deaths = self._deaths.died(reading.tolist())
        last = f"reader process {reader.pid} {ended}"
        if twice:
            which = listed(np.array(twice))
            verb = "has" if len(twice) == 1 else "have"
            text = f"{which} of the data set {self._data_set} {verb} killed two readers; the last: {last}"
            self._dead = self._dead or ReaderError(f"{text} while reading {listed(reading)}", hint=hint)
        elif self._deaths.too_many_idle(self.processes):
            text = f"{self._deaths.idle} readers of the data set {self._data_set} died in a row, reading nothing"
            self._dead = self._dead or ReaderError(f"{text}; the last: {last}", hint=hint)
        else:
            doing = (
                f"while reading {listed(reading)}; another one reads them again" if reader.has_begun else "while idle"
            )
            _log(f"{last} {doing}")
        for order in reversed(reader.in_hand):
            if order.wanted:
                self._waiting[order.key] = order
                self._waiting.move_to_end(order.key, last=False)
        self._release(reader)

    def _cause_of_death(self, reader: _Reader) -> tuple[str, str]:
        """(how the reader ended, hint), as text."""
        if not _has_exited(reader, wait_ms=2000):
            signal.pidfd_send_signal(reader.pidfd, signal.SIGKILL)
            return "closed its connection", "the data set's code must not close files that it did not open"
        return _ending(self._parent.status(reader.pid))

    def _lost(self) -> None:
        self._dead = self._dead or ReadersLost(
            f"the process that forks the readers of the data set {self._data_set} is dead", hint=_KILLED
        )

    def _release(self, reader: _Reader) -> None:
        self._readers.remove(reader)
        for descriptor in (reader.pidfd, reader.connection.fileno()):
            self._poll.unregister(descriptor)
            del self._by_descriptor[descriptor]
        reader.connection.close()
        os.close(reader.pidfd)


def _has_exited(reader: _Reader, wait_ms: int = 0) -> bool:
    exits = select.poll()
    exits.register(reader.pidfd, select.POLLIN)
    return bool(exits.poll(wait_ms))


def _ending(status: int) -> tuple[str, str]:
    """
    >>> _ending(3)[0], _ending(-9)[0]
    ('exited with status 3', 'was killed by SIGKILL')
    """
    if status >= 0:
        return f"exited with status {status}", "the data set's code ended its own process (os._exit?)"
    killer = signal.Signals(-status)
    if killer in _CRASHES:
        hint = "native code that the data set calls has crashed; read these samples alone to find which one"
    else:
        hint = _KILLED if killer == signal.SIGKILL else "some other process sent this signal"
    return f"was killed by {killer.name}", hint


def _log(text: str) -> None:
    with suppress(OSError):  # the worker's log is gone
        print(text, file=sys.stderr, flush=True)
