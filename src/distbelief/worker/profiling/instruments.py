"""Which code is which phase of a step, and putting a clock around it for a while.

The step path knows nothing of this: functions are replaced while a profile is taken and put back after it, so a run
that is not profiled executes not one instruction more. The price is this table of names, which a test holds to the
code.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

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


DATA, FORWARD, BACKWARD, REDUCE, OPTIMIZER, WAIT = "data", "forward", "backward", "reduce", "optimizer", "wait"
EVALUATION, CHECKPOINT, REGROUP = "evaluation", "checkpoint", "regroup"


@dataclass(frozen=True)
class Instrument:
    phase: str
    module: str
    owner: str
    """A class, with all that are derived from it; empty: functions of the module itself."""
    names: tuple[str, ...]
    is_context: bool = False


INSTRUMENTS = (
    Instrument(DATA, "distbelief.worker.feed", "Feed", ("fetch",)),
    Instrument(
        FORWARD, "distbelief.strategies.flatmodel.compute", "ShardComputer", ("forward_context",), is_context=True
    ),
    Instrument(FORWARD, "distbelief.strategies.mesh.run.runner", "StageRunner", ("_forward",)),
    Instrument(BACKWARD, "torch", "Tensor", ("backward",)),
    Instrument(
        BACKWARD,
        "distbelief.strategies.mesh.run.runner",
        "StageRunner",
        ("_backward", "_backward_input", "_backward_weight"),
    ),
    Instrument(REDUCE, "distbelief.transport.shm.exchange", "SharedExchange", ("_reduce", "share")),
    Instrument(
        REDUCE, "distbelief.transport.gloo.exchange", "TorchExchange", ("begin", "publish", "reduced", "settle")
    ),
    Instrument(REDUCE, "distbelief.transport.device.exchange", "DeviceExchange", ("_add_up", "_publish_all")),
    Instrument(REDUCE, "distbelief.strategies.mesh.run.gradientsum", "DataParallelSum", ("add",)),
    Instrument(REDUCE, "distbelief.strategies.mesh.run.gradientsum", "TiedSum", ("add",)),
    Instrument(REDUCE, "distbelief.strategies.ps.worker.synchronous", "SynchronousReplica", ("_push", "_bring")),
    Instrument(REDUCE, "distbelief.strategies.ps.worker.asynchronous", "AsynchronousReplica", ("_push", "fetch")),
    Instrument(OPTIMIZER, "distbelief.strategies.dataparallel.replica", "DataParallelReplica", ("_update",)),
    Instrument(OPTIMIZER, "distbelief.strategies.localsgd.trainer", "LocalTrainer", ("_update",)),
    Instrument(OPTIMIZER, "distbelief.strategies.mesh.state.memberstate", "MemberState", ("apply",)),
    Instrument(OPTIMIZER, "distbelief.strategies.sandblaster.member", "SearchingMember", ("_drive",)),
    Instrument(WAIT, "distbelief.strategies.flatmodel.compute", "PendingLoss", ("numbers",)),
    Instrument(WAIT, "distbelief.transport.device.exchange", "DeviceExchange", ("finish_copies",)),
    Instrument(WAIT, "distbelief.strategies.ps.worker.exchange", "DeviceServerExchange", ("bring",)),
    Instrument(WAIT, "distbelief.strategies.localsgd.trainer", "DeviceTrainer", ("_bring_out",)),
    Instrument(WAIT, "distbelief.transport.shm.futexflags", "FutexFlags", ("await_all",)),
    Instrument(WAIT, "distbelief.transport.gloo.exchange", "TorchExchange", ("share",)),
    Instrument(WAIT, "distbelief.transport.gloo.group", "TorchGroup", ("gather",)),
    Instrument(WAIT, "distbelief.strategies.ps.protocol.client", "ServerClient", ("_wait", "nap")),
    Instrument(WAIT, "distbelief.strategies.mesh.run.stagetransfer", "StageTransfer", ("_wait_for",)),
    Instrument(WAIT, "distbelief.strategies.mesh.run.replica", "MeshReplica", ("_vote",)),
    Instrument(WAIT, "distbelief.strategies.ps.worker.asynctraining", "", ("_nap",)),
    Instrument(EVALUATION, "distbelief.worker.evaluate", "Evaluator", ("evaluate_with",)),
    Instrument(CHECKPOINT, "distbelief.worker.saving", "Saver", ("take", "let_go")),
    Instrument(CHECKPOINT, "distbelief.strategies.flatmodel.copying", "Copy", ("finish_before_a_write",)),
)


@dataclass
class Instruments:
    """Clocks around all that is loaded of the table, from `attach` to `detach`."""

    spans: Spans
    _replaced: list[tuple[Any, str, Callable[..., Any]]] = field(default_factory=list)

    def attach(self) -> None:
        for instrument in INSTRUMENTS:
            module = sys.modules.get(instrument.module)  # what is not loaded is not used
            clock = self.spans.timed_context if instrument.is_context else self.spans.timed
            for owner, name in places(instrument, module) if module else ():
                original = vars(owner)[name]
                self._replaced.append((owner, name, original))
                setattr(owner, name, clock(instrument.phase, original))

    def detach(self) -> None:
        while self._replaced:
            setattr(*self._replaced.pop())


def places(instrument: Instrument, module: Any) -> Iterator[tuple[Any, str]]:
    """Whose attributes the functions are, with their names."""
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
