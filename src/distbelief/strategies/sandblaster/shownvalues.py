"""The values that servers show at the moment, on a worker (`sandblaster`). They may change while they are fetched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from distbelief.strategies.flatmodel.compute import ShardComputer
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import PulledValues, PullValues, Question
from distbelief.strategies.ps.rules.slicing import SliceShape
from distbelief.strategies.ps.worker.exchange import ServerExchange
from distbelief.transport.shm.segment import Segment

AGAIN_S = 0.01


class ShownValues:
    def __init__(
        self, computer: ShardComputer, exchange: ServerExchange, slices: Sequence[SliceShape],
        take: Callable[[PulledValues, Any], None],
    ) -> None:  # fmt: skip
        """`take`: copies the values of a slice to their places."""
        self.number = -1
        """With which the values that this member has were shown."""
        self._computer = computer
        self._exchange = exchange
        self._slices = slices
        self._take = take
        self._mapped: dict[str, Segment] = {}
        self._words: np.ndarray | None = None
        """Of a slice whose memory this process can see: what it shows."""

    def bring(self, number: int) -> bool:
        """Fetch what is shown with that number. False: something else is, by now."""
        if number == self.number:
            return True
        self.number = -1
        whole = True

        def fetched(letter: Framed) -> None:
            nonlocal whole
            message: PulledValues = letter.message
            whole &= message.version == number and self._copied(message, letter.payload)
            if message.slice == 0:
                self._computer.commit_integers(message.integers or None)

        inline = not self._exchange.maps
        questions = [partial(_fetch, shape.number, number, inline) for shape in self._slices]
        self._exchange.client.ask(questions, self._exchange.abort, fetched)
        if whole:
            self.number = number
        return whole

    def insist(self, number: int) -> None:
        """The same, where nobody shows anything else until this member has it: what was overwritten is there again."""
        while not self.bring(number):
            self._exchange.client.nap(AGAIN_S)

    def _copied(self, message: PulledValues, payload: Any) -> bool:
        """Copy the values of a slice. False: they were overwritten meanwhile."""
        self._take(message, payload)
        if not message.segment:
            return True
        if message.segment not in self._mapped:
            assert self._exchange.segments is not None
            self._mapped[message.segment] = self._exchange.segments.segment(message.segment)
        self._words = np.frombuffer(self._mapped[message.segment].buffer, np.int64, 2)
        return int(self._words[0]) == message.version  # it is set before anything is written

    def are_over(self) -> bool:
        """Whether something else is known to be shown by now: what is computed with these values helps nobody."""
        return self._words is not None and int(self._words[0]) != self.number


def _fetch(number: int, version: int, inline: bool, ticket: int) -> Question:
    return PullValues(ticket, number, version, inline)
