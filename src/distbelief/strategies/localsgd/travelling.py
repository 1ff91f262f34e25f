"""What compressed differences are on the wire: counted over a run, and said to people."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distbelief.compression.exchanges.partialsums import CodedParts
from distbelief.compression.parts import PartsCoding
from distbelief.transport.exchange import Exchange, Source

_COUNTS = 16  # bytes: two numbers


class Travelling:
    """Of one member, in one generation. Without compression it counts nothing and says nothing."""

    def __init__(self, exchange: Exchange, coding: PartsCoding | None, replicas: int, copied: int) -> None:
        """`copied`: bytes that members send each other in every round for a replica's sake, without what it owes."""
        self._coded = exchange if isinstance(exchange, CodedParts) else None
        self._copied = copied
        self._owing = 4 * coding.elements * replicas if coding and copied else 0
        self._replicas = replicas
        self._news: list[str] = []
        if self._coded is not None:
            self._bytes = np.frombuffer(exchange.state(_COUNTS, "traffic").buffer, np.int64, 2)
        if coding is None or exchange.size == 1:
            return
        if self._coded is None:
            self._news.append(
                f"differences stay in shared memory, where {coding.method} saves nothing; it rounds them as elsewhere"
            )
        else:
            self._news.append(f"differences are compressed ({coding.method}): every replica's go to all workers")

    def count(self, apart: Sequence[Source], together: Sequence[Source]) -> None:
        """A round is committed. `apart`: what was added up in it; `together`: the same, had it not been compressed."""
        if self._coded is None:
            return
        wire, plain = self._coded.bill(apart, together)
        if wire >= plain > 0 and not self._bytes[1]:
            self._news.append(
                f"{self._coded.coding.method} saves nothing on {self._coded.size} workers, since each of the "
                f"{self._replicas} replicas sends its own differences: have fewer replicas, or take int8 or topk=0.01"
            )
        self._bytes += (wire + self._copied + self._owing, plain + self._copied)

    @property
    def traffic(self) -> tuple[int, int]:
        return (0, 0) if self._coded is None else (int(self._bytes[0]), int(self._bytes[1]))

    def lines(self) -> list[str]:
        lines, self._news = self._news, []
        return lines
