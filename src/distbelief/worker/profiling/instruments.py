"""Which code is which phase of a step, and putting a clock around it for a while.

The step path knows nothing of this: functions are replaced while a profile is taken and put back after it, so a run
that is not profiled executes not one instruction more. The price is this table of names, which a test holds to the
code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from distbelief.worker.profiling.spans import Spans

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


_COMM, _STRATEGIES, _WORKER = "distbelief.comm", "distbelief.strategies", "distbelief.worker"

INSTRUMENTS = (
    Instrument(DATA, f"{_WORKER}.feed", "Feed", ("fetch",)),
    Instrument(FORWARD, f"{_STRATEGIES}.compute", "ShardComputer", ("forward_context",), is_context=True),
    Instrument(FORWARD, f"{_STRATEGIES}.mesh.running", "Runner", ("_forward",)),
    Instrument(BACKWARD, "torch", "Tensor", ("backward",)),
    Instrument(BACKWARD, f"{_STRATEGIES}.mesh.running", "Runner", ("_backward", "_backward_input", "_backward_weight")),
    Instrument(REDUCE, f"{_COMM}.shared", "SharedExchange", ("_reduce", "share")),
    Instrument(REDUCE, f"{_COMM}.torchgroup", "TorchExchange", ("begin", "publish", "reduced", "settle")),
    Instrument(REDUCE, f"{_COMM}.ondevice", "OnDevice", ("_add_up", "_publish_all")),
    Instrument(REDUCE, f"{_STRATEGIES}.mesh.gradients", "DataParallelSum", ("add",)),
    Instrument(REDUCE, f"{_STRATEGIES}.mesh.gradients", "TiedSum", ("add",)),
    Instrument(REDUCE, f"{_STRATEGIES}.ps.served", "ServedReplica", ("_push", "_bring")),
    Instrument(REDUCE, f"{_STRATEGIES}.ps.asynchronous", "AsynchronousReplica", ("_push", "fetch")),
    Instrument(OPTIMIZER, f"{_STRATEGIES}.replica", "DataParallelReplica", ("_update",)),
    Instrument(OPTIMIZER, f"{_STRATEGIES}.local.trainer", "LocalTrainer", ("_update",)),
    Instrument(OPTIMIZER, f"{_STRATEGIES}.mesh.livestate", "LiveState", ("apply",)),
    Instrument(OPTIMIZER, f"{_STRATEGIES}.search.searching", "SearchingMember", ("_drive",)),
    Instrument(WAIT, f"{_STRATEGIES}.compute", "Told", ("numbers",)),
    Instrument(WAIT, f"{_COMM}.ondevice", "OnDevice", ("finish_copies",)),
    Instrument(WAIT, f"{_COMM}.servedondevice", "ServedOnDevice", ("bring",)),
    Instrument(WAIT, f"{_STRATEGIES}.local.ondevice", "DeviceTrainer", ("_bring_out",)),
    Instrument(WAIT, f"{_COMM}.words", "Words", ("await_all",)),
    Instrument(WAIT, f"{_COMM}.torchgroup", "TorchExchange", ("share",)),
    Instrument(WAIT, f"{_COMM}.group", "TorchGroup", ("gather",)),
    Instrument(WAIT, f"{_COMM}.serverclient", "ServerClient", ("_wait", "nap")),
    Instrument(WAIT, f"{_STRATEGIES}.mesh.wires", "Wires", ("_await",)),
    Instrument(WAIT, f"{_STRATEGIES}.mesh.replica", "MeshReplica", ("_vote",)),
    Instrument(WAIT, f"{_WORKER}.asynchronous", "", ("_nap",)),
    Instrument(EVALUATION, f"{_WORKER}.evaluate", "Evaluator", ("evaluate_with",)),
    Instrument(CHECKPOINT, f"{_WORKER}.saving", "Saver", ("take", "let_go")),
    Instrument(CHECKPOINT, f"{_STRATEGIES}.copying", "Copy", ("finish_before_a_write",)),
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
