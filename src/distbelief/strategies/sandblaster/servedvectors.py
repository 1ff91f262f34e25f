"""Vectors on parameter servers, for a driver on a worker: commands go out numbered, and only scalars come back.

Commands wait until something is asked, and go out together: a few messages per iteration and slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from distbelief.strategies.ps.protocol.client import ServerClient, Stop
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import Question
from distbelief.strategies.sandblaster.messages import (
    Combine,
    Command,
    Copy,
    Do,
    Drop,
    Finish,
    Produced,
    Products,
    Show,
    first_number,
)
from distbelief.strategies.sandblaster.vectors import Pair, Term, add_partials


class ServedVectors:
    """See `Vectors`."""

    def __init__(self, client: ServerClient, slices: int, size: int, generation: int, abort: Stop) -> None:
        self._client = client
        self._slices = slices
        self._size = size
        self._abort = abort
        self._number = first_number(generation) - 1
        self._waiting: list[Command] = []

    @property
    def size(self) -> int:
        return self._size

    @property
    def number(self) -> int:
        """Of the commands that were sent last."""
        return self._number

    def combine(self, target: str, terms: Sequence[Term]) -> None:
        self._waiting.append(Combine(target, list(terms)))

    def copy(self, target: str, source: str) -> None:
        self._waiting.append(Copy(target, source))

    def drop(self, names: Sequence[str]) -> None:
        self._waiting.append(Drop(list(names)))

    def show(self, point: str, evaluation: int = -1) -> None:
        """Let members fetch it. The number of this is the next one."""
        self._waiting.append(Show(point, evaluation))
        self._send()

    def finish(self, evaluation: int, gradient: str, factor: float) -> None:
        self._waiting.append(Finish(evaluation, gradient, factor))

    def settle(self) -> None:
        """Return when everything counts, whoever dies."""
        self._send()
        self._client.settle(self._abort)

    def dot(self, pairs: Sequence[Pair]) -> list[float]:
        found = self._ask(Products(0, 0, 0, dots=list(pairs)))
        return add_partials(self._size, [one for reply in found for one in reply.dots])

    def sum_abs(self, names: Sequence[str]) -> list[float]:
        found = self._ask(Products(0, 0, 0, sums=list(names)))
        return add_partials(self._size, [one for reply in found for one in reply.sums])

    def max_abs(self, names: Sequence[str]) -> list[float]:
        found = self._ask(Products(0, 0, 0, largest=list(names)))
        values = zip(*(reply.largest for reply in found), strict=True)
        # Python's max does not notice a NaN that is not first.
        return [next((one for one in some if one != one), max(some)) for some in values]

    def _send(self) -> None:
        if not self._waiting:
            return
        self._number += 1
        commands = Do(self._number, self._waiting)
        self._waiting = []
        for number in range(self._slices):
            self._client.push(number, commands)
        self._client.flush()

    def _ask(self, asked: Products) -> list[Produced]:
        self._send()
        found: list[Produced] = []

        def produced(letter: Framed) -> None:
            found.append(letter.message)

        questions = [partial(_of_slice, asked, self._number, number) for number in range(self._slices)]
        self._client.ask(questions, self._abort, produced)
        return found


def _of_slice(asked: Products, after: int, number: int, ticket: int) -> Question:
    return Products(ticket, number, after, asked.dots, asked.sums, asked.largest)
