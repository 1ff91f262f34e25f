"""The poll loop of a supervising process: descriptors with handlers, and signals that stop a run as a descriptor."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import zmq


class PollLoop:
    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[], None]] = {}

    def watch(self, item: Any, handler: Callable[[], None]) -> None:
        """`item`: a ZeroMQ socket, a descriptor, or an object with `fileno`. A later handler replaces the earlier."""
        self._poller.register(_key(item), zmq.POLLIN)
        self._handlers[_key(item)] = handler

    def unwatch(self, item: Any) -> None:
        self._poller.unregister(_key(item))
        del self._handlers[_key(item)]

    def serve(self, timeout_s: float) -> None:
        """Wait until an item is readable, at most this long, and call the handlers."""
        for item, _ in self._poller.poll(int(timeout_s * 1000)):
            if item in self._handlers and (not isinstance(item, int) or _readable(item)):
                self._handlers[item]()


def _key(item: Any) -> Any:
    return item if isinstance(item, int | zmq.Socket) else item.fileno()


def _readable(descriptor: int) -> bool:
    """Whether it is still readable: another handler may have read from it (an exit arrives while a fork is pending)."""
    look = select.poll()
    look.register(descriptor, select.POLLIN)
    return bool(look.poll(0))


STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a request to end, and the loss of the terminal: each stops a run."""


class Signals:
    """A signal of STOPPING becomes a request to stop, once; a second Ctrl-C or SIGTERM ends at once.

    SIGHUP never makes a stop more urgent, because one lost terminal sends several signals: the shell and the kernel
    send SIGHUP, and a session manager adds SIGTERM.

    A SIGINT or SIGHUP that is ignored at the start stays ignored. A shell without job control starts
    `distbelief train … &` with SIGINT ignored, because Ctrl-C is then meant for the program in the foreground; `nohup`
    ignores SIGHUP. SIGTERM stops such a run.
    """

    def __init__(self) -> None:
        self.received = 0
        self.count = 0
        """2 or more: end at once."""
        self._insisted = 0
        self._old: dict[int, Any] = {}
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                if number != signal.SIGTERM and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._old[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: object) -> None:
        self._insisted += number != signal.SIGHUP
        self.take(number, max(1, self._insisted))

    def take(self, number: int, count: int) -> None:
        """As if this process had received the signal, and `count` signals in all; another machine has received them."""
        if count > self.count:
            self.received = self.received or number
            self.count = count
            os.eventfd_write(self.wake_fd, 1)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        os.close(self.wake_fd)


def block_signals() -> set[signal.Signals]:
    """Block the signals of STOPPING in this process and the processes that it starts. Launchers such as Slurm send
    signals to every process, but the leading process decides. Returns the signals that were blocked before."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # type: ignore[return-value]


@contextlib.contextmanager
def signals_blocked(wanted: bool) -> Iterator[None]:
    """Block the signals of STOPPING in processes that the `with` block starts."""
    before = block_signals() if wanted else None
    try:
        yield
    finally:
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
