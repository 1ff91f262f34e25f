"""The poll loop of a supervising process: descriptors with handlers, and Ctrl-C and SIGTERM as a descriptor."""

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


class Signals:
    """Ctrl-C and SIGTERM become a request to stop, once; a second one ends at once.

    A SIGINT that is ignored at the start stays ignored: a shell without job control starts `distbelief train … &` that
    way, because Ctrl-C is then meant for the program in the foreground. SIGTERM stops such a run.
    """

    def __init__(self) -> None:
        self.received = 0
        self.count = 0
        self._old: dict[int, Any] = {}
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if number == signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._old[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: object) -> None:
        self.take(number)

    def take(self, number: int) -> None:
        """As if this process had received the signal; another machine has received it."""
        self.received = self.received or number
        self.count += 1
        os.eventfd_write(self.wake_fd, 1)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        os.close(self.wake_fd)


def block_signals() -> set[signal.Signals]:
    """Block Ctrl-C and SIGTERM in this process and the processes that it starts. Launchers such as Slurm send signals
    to every process, but the leading process decides. Returns the signals that were blocked before."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})  # type: ignore[return-value]


@contextlib.contextmanager
def signals_blocked(wanted: bool) -> Iterator[None]:
    """Block Ctrl-C and SIGTERM in processes that the `with` block starts."""
    before = block_signals() if wanted else None
    try:
        yield
    finally:
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
