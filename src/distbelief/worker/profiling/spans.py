"""Spans of time, as they end: what a worker was doing, from when on, and for how long.

Inside of a span there can be others; what counts for a phase is what is left without them. A span within one of the
same phase is not worth telling.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

Span = tuple[str, int, int, int, int]
"""(phase, start, duration, CPU time of its thread, thread): nanoseconds, by `time.perf_counter_ns`."""


class Spans:
    """Spans of all threads that come by. Those that have ended wait in `ended` to be taken."""

    def __init__(self) -> None:
        self.ended: list[Span] = []
        self.at_end: Callable[[], None] = lambda: None
        """Called after each span that lies in no other, by the thread that has made this."""
        self._thread = threading.get_ident()
        self._own = threading.local()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        under_way = self._under_way()
        if under_way and under_way[-1] == phase:
            yield
            return
        under_way.append(phase)
        cpu, started = time.thread_time_ns(), time.perf_counter_ns()
        try:
            yield
        finally:
            took = time.perf_counter_ns() - started
            self.ended.append((phase, started, took, time.thread_time_ns() - cpu, threading.get_native_id()))
            under_way.pop()
            if not under_way and threading.get_ident() == self._thread:
                self.at_end()

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """That function, with a span around each call."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.during(phase):
                return function(*args, **kwargs)

        return call

    def timed_context(
        self, phase: str, function: Callable[..., AbstractContextManager[Any]]
    ) -> Callable[..., AbstractContextManager[Any]]:
        """The same for a function that makes a context: the span is what the context encloses."""

        @wraps(function)
        @contextmanager
        def call(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with self.during(phase), function(*args, **kwargs) as value:
                yield value

        return call

    def take(self) -> list[Span]:
        ended, self.ended = self.ended, []
        return ended

    def _under_way(self) -> list[str]:
        found: list[str] | None = getattr(self._own, "phases", None)
        if found is None:
            found = self._own.phases = []
        return found
