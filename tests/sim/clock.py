"""A virtual clock: what is to happen, in the order of its time. It knows nothing of clusters.

Times are in virtual seconds. Two things at the same time happen in the order in which they were asked for, so that a
seed always gives the same run.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

LAST_EVENTS = 30


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.stopped = False
        self.trace: deque[tuple[float, str, tuple[Any, ...]]] = deque(maxlen=LAST_EVENTS)
        """The last things of note; made into text only when somebody wants to read it."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def after(self, delay_s: float, what: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._number, what, arguments))

    def note(self, text: str, *facts: Any) -> None:
        """Remember that this happened: `text` with each {} replaced by a fact, when it is read."""
        self.trace.append((self.now, text, facts))

    def run(self, until_s: float) -> None:
        heap = self._heap
        while heap and not self.stopped and heap[0][0] <= until_s:
            at, _, what, arguments = heapq.heappop(heap)
            self.now = at
            self.events += 1
            what(*arguments)

    def story(self) -> list[str]:
        return [f"{at:10.3f} s  {text.format(*facts)}" for at, text, facts in self.trace]
