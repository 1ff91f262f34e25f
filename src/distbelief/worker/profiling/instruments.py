"""Times the phases of a step: which functions belong to which phase, and a clock around each of them.

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

from distbelief.strategies.base import Instrument

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
    Instrument(
        "forward", "distbelief.strategies.flatmodel.compute", "ShardComputer", ("forward_context",), is_context=True
    ),
    Instrument("backward", "torch", "Tensor", ("backward",)),
    Instrument("reduce", "distbelief.transport.shm.exchange", "SharedExchange", ("_reduce", "share")),
    Instrument(
        "reduce", "distbelief.transport.gloo.exchange", "TorchExchange", ("begin", "publish", "reduced", "settle")
    ),
    Instrument("reduce", "distbelief.transport.device.exchange", "DeviceExchange", ("_add_up", "_publish_all")),
    Instrument("wait", "distbelief.strategies.flatmodel.compute", "PendingLoss", ("numbers",)),
    Instrument("wait", "distbelief.transport.device.exchange", "DeviceExchange", ("finish_copies",)),
    Instrument("wait", "distbelief.transport.shm.futexflags", "FutexFlags", ("await_all",)),
    Instrument("wait", "distbelief.transport.gloo.exchange", "TorchExchange", ("share",)),
    Instrument("wait", "distbelief.transport.gloo.group", "TorchGroup", ("gather",)),
    Instrument("evaluation", "distbelief.worker.evaluate", "Evaluator", ("evaluate_with",)),
    Instrument("checkpoint", "distbelief.worker.saving", "Saver", ("take", "let_go")),
    Instrument("checkpoint", "distbelief.strategies.flatmodel.copying", "Copy", ("finish_before_a_write",)),
)
"""The functions that every strategy may run. `Strategy.instruments` adds the strategy's own."""


@dataclass
class Instruments:
    """Clocks around the functions of all loaded modules of the table, from `attach` to `detach`."""

    spans: Spans
    of_strategy: Sequence[Instrument] = ()
    _replaced: list[tuple[Any, str, Callable[..., Any]]] = field(default_factory=list)

    def attach(self) -> None:
        for instrument in (*INSTRUMENTS, *self.of_strategy):
            module = sys.modules.get(instrument.module)  # a module that is not loaded is not used
            clock = self.spans.timed_context if instrument.is_context else self.spans.timed
            for owner, name in places(instrument, module) if module else ():
                original = vars(owner)[name]
                self._replaced.append((owner, name, original))
                setattr(owner, name, clock(instrument.phase, original))

    def detach(self) -> None:
        while self._replaced:
            setattr(*self._replaced.pop())


def places(instrument: Instrument, module: Any) -> Iterator[tuple[Any, str]]:
    """The classes, or the module, that have the functions as attributes, with the functions' names."""
    owners = _family(getattr(module, instrument.owner)) if instrument.owner else [module]
    for owner in owners:
        for name in instrument.names:
            if name in vars(owner):
                yield owner, name


def _family(head: type[Any]) -> list[type[Any]]:
    found = [head]
    for child in type.__subclasses__(head):
        found += [one for one in _family(child) if one not in found]
    return found
