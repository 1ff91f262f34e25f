"""Descriptors and sockets, each with what is to be done when it can be read."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any

import zmq


class Watching:
    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[], None]] = {}

    def watch(self, item: Any, handler: Callable[[], None]) -> None:
        """`item`: a ZeroMQ socket, a descriptor, or whatever has one. A later handler takes the place of an earlier."""
        self._poller.register(_key(item), zmq.POLLIN)
        self._handlers[_key(item)] = handler

    def unwatch(self, item: Any) -> None:
        self._poller.unregister(_key(item))
        del self._handlers[_key(item)]

    def serve(self, timeout_s: float) -> None:
        """Wait until something can be read, or so long, and call the handlers."""
        for item, _ in self._poller.poll(int(timeout_s * 1000)):
            if item in self._handlers and (not isinstance(item, int) or _readable(item)):
                self._handlers[item]()


def _key(item: Any) -> Any:
    return item if isinstance(item, int | zmq.Socket) else item.fileno()


def _readable(descriptor: int) -> bool:
    """Still: another handler may have read what there was (an exit is read while a fork is awaited)."""
    look = select.poll()
    look.register(descriptor, select.POLLIN)
    return bool(look.poll(0))
