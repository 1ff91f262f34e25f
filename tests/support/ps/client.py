"""A worker's side of the servers in the simulation: no sockets, and no time."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from distbelief.control.messages import ServerMap
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import Acknowledged, NotPrimary, Push


class Client:
    """Sends what is not answered again, to whoever is primary by the newest map that it knows."""

    def __init__(self, number: int, slices: int, post: Callable[[Any, Any, Framed], None]) -> None:
        self.number = number
        self._slices = slices
        self._post = post
        self._sequences: dict[int, int] = {}
        self._tickets = 0
        self.waiting: dict[Any, Framed] = {}
        self.replies: dict[int, Any] = {}
        self.known: ServerMap | None = None

    def restart(self) -> None:
        self.waiting.clear()

    def push(self, number: int, content: Any, payload: Any = None) -> None:
        sequence = self._sequences.get(number, -1) + 1
        self._sequences[number] = sequence
        self.waiting[number, sequence] = Framed(Push(self.number, sequence, number, content), payload)
        self.send((number, sequence))

    def ask(self, make: Callable[[int, int], Any]) -> Generator[None, None, list[Any]]:
        """One question to every slice; goes on when all are answered."""
        tickets = []
        for number in range(self._slices):
            self._tickets += 1
            tickets.append(self._tickets)
            self.waiting[self._tickets] = Framed(make(self._tickets, number))
            self.send(self._tickets)
        while any(ticket not in self.replies for ticket in tickets):
            yield
        return [self.replies.pop(ticket) for ticket in tickets]

    def send(self, key: Any) -> None:
        framed = self.waiting[key]
        if self.known is not None:
            to = self.known.primaries[framed.message.slice]
            self._post(("worker", self.number), ("server", to), framed)

    def hear(self, framed: Framed) -> None:
        message = framed.message
        match message:
            case Acknowledged():
                self.waiting.pop((message.slice, message.sequence), None)
            case NotPrimary():
                pass  # it is sent again
            case _:
                if self.waiting.pop(message.ticket, None):
                    self.replies[message.ticket] = message
