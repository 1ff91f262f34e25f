"""Times the phases of a step: a clock around each function that an `Instrument` names.

The functions are replaced while a profile is recorded and restored after it, so a run without a profile executes no
additional instruction. The functions are named in strings; a test compares the names with the code.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from distbelief.instrument import Instrument, declared, places

Span = tuple[str, int, int, int, int]
"""(phase, start, duration, CPU time of its thread, thread): nanoseconds, by `time.perf_counter_ns`."""


class Spans:
    """Records the spans of all threads: what a thread did, from when, and for how long. `ended` holds the finished
    spans until `take` is called.

    Spans nest: the time of a phase is the time of its spans without the spans inside them. A span inside one of the
    same phase is not recorded."""

    def __init__(self) -> None:
        self.ended: list[Span] = []
        self.at_end: Callable[[], None] = lambda: None
        """Called after each outermost span of the thread that created this object."""
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
        """The function, with a span around each call."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.during(phase):
                return function(*args, **kwargs)

        return call

    def timed_context(
        self, phase: str, function: Callable[..., AbstractContextManager[Any]]
    ) -> Callable[..., AbstractContextManager[Any]]:
        """The same for a function that returns a context manager: the span covers the `with` block."""

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


REGROUP = "regroup"
"""The phase between two generations. No function has it: the profiler measures it."""

INSTRUMENTS = (
    Instrument("data", "distbelief.worker.feed", "Feed", ("fetch",)),
    Instrument("backward", "torch", "Tensor", ("backward",)),
    Instrument("evaluation", "distbelief.worker.evaluate", "Evaluator", ("evaluate_with",)),
    Instrument("checkpoint", "distbelief.worker.saving", "Saver", ("take", "let_go")),
)
"""The functions of the worker and of torch. The modules below the worker declare theirs, and so does the strategy
(`Strategy.instruments`)."""


@dataclass
class Instruments:
    """Clocks around the functions that all instruments name in loaded modules, from `attach` to `detach`."""

    spans: Spans
    of_strategy: Sequence[Instrument] = ()
    _replaced: list[tuple[Any, str, Callable[..., Any]]] = field(default_factory=list)

    def attach(self) -> None:
        for instrument in (*INSTRUMENTS, *declared(), *self.of_strategy):
            module = sys.modules.get(instrument.module)  # a module that is not loaded is not used
            clock = self.spans.timed_context if instrument.is_context else self.spans.timed
            for owner, name in places(instrument, module) if module else ():
                original = vars(owner)[name]
                self._replaced.append((owner, name, original))
                setattr(owner, name, clock(instrument.phase, original))

    def detach(self) -> None:
        while self._replaced:
            setattr(*self._replaced.pop())
