"""The worker's control logic, pure: the actions that follow from each command and local event.

No sockets, threads, clock or torch; `link.py` and `process.py` perform the actions. A member ignores commands of a
lower epoch and never trains a generation twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from distbelief.control.messages import (
    RUN_ENDS,
    Command,
    EndRun,
    Introduce,
    JoinAgain,
    Member,
    PastGeneration,
    Refuse,
    Retire,
    SaveAt,
    SealCheckpoint,
    Serve,
    ServerMap,
    StartGeneration,
    WrittenPart,
)
from distbelief.shards import Range

Phase = Literal["waiting", "training", "finished", "ended"]


@dataclass(frozen=True)
class WorkerState:
    worker: int
    phase: Phase = "waiting"
    epoch: int = 0
    generation: int = 0


@dataclass(frozen=True)
class AbortStep:
    """Give up the collective in flight."""

    reason: str


@dataclass(frozen=True)
class TrainGeneration:
    epoch: int
    generation: int
    rank: int
    members: tuple[Member, ...]
    transport: str
    past: tuple[PastGeneration, ...] = ()
    reported: int = 0
    sealed: int = 0
    degrees: tuple[int, ...] = ()

    @property
    def ranges(self) -> tuple[Range, ...]:
        return tuple(member.shards for member in self.members)


@dataclass(frozen=True)
class StandDown:
    """Release the generation, confirm it (WorkerLeft), and wait."""

    generation: int


@dataclass(frozen=True)
class TellAgain:
    """Repeat all events and step reports: a new coordinator lacks them. It knows the steps before `reported`."""

    reported: int


@dataclass(frozen=True)
class Save:
    """Take a snapshot after `step` applied steps."""

    step: int


@dataclass(frozen=True)
class Seal:
    """Write the manifest of a checkpoint whose parts are all written."""

    step: int
    parts: tuple[WrittenPart, ...]


@dataclass(frozen=True)
class LearnMap:
    """A newer map of parameter servers and their slices."""

    map: ServerMap


@dataclass(frozen=True)
class Leave:
    status: str
    """completed · failed · stopped · left · refused"""
    reason: str


Action = AbortStep | TrainGeneration | StandDown | TellAgain | Save | Seal | LearnMap | Leave


@dataclass(frozen=True)
class GenerationFinished:
    """All steps are done and reported; the worker waits for the end of the run."""

    generation: int


def step(state: WorkerState, event: Command | GenerationFinished) -> tuple[WorkerState, list[Action]]:
    """The next state and what to do.

    >>> state, actions = step(WorkerState(0), EndRun(epoch=1, status="completed"))
    >>> state.phase, actions
    ('ended', [Leave(status='completed', reason='')])
    """
    if state.phase == "ended":
        return state, []
    if isinstance(event, GenerationFinished):
        current = event.generation == state.generation and state.phase == "training"
        return (replace(state, phase="finished") if current else state), []
    if isinstance(event, JoinAgain):  # of another run, which has epochs of its own
        leave = Leave("stopped", "another start of the run is at the coordinator's address")
        return replace(state, phase="ended"), [*([AbortStep(RUN_ENDS)] if state.phase == "training" else []), leave]
    if event.epoch < state.epoch:
        return state, []  # from an older coordinator that was replaced
    match event:
        # These commands do not announce a new coordinator: `state.epoch` stays. The new coordinator sees the old epoch
        # in the next heartbeat and sends Introduce.
        case SaveAt():
            return state, [Save(event.step)]
        case SealCheckpoint():
            return state, [Seal(event.step, tuple(event.parts))]
        case Serve():
            return state, [LearnMap(event.map)]
    state = replace(state, epoch=event.epoch)
    stop: list[Action] = [AbortStep(RUN_ENDS)] if state.phase == "training" else []
    match event:
        case EndRun():
            return replace(state, phase="ended"), [*stop, Leave(event.status, event.reason)]
        case Refuse():
            return replace(state, phase="ended"), [*stop, Leave("refused", event.reason)]
        case Introduce():
            return state, [TellAgain(event.reported)]
        case Retire():
            return _retire(state, event)
        case StartGeneration():
            return _start(state, event)
    return state, []  # not for workers


def _retire(state: WorkerState, event: Retire) -> tuple[WorkerState, list[Action]]:
    if event.generation < state.generation:
        return state, []
    # A worker that has left already reports it again: its WorkerLeft may be lost.
    stop: list[Action] = [AbortStep("this worker leaves")] if state.phase == "training" else []
    return replace(state, phase="waiting", generation=event.generation), [*stop, StandDown(event.generation)]


def _start(state: WorkerState, event: StartGeneration) -> tuple[WorkerState, list[Action]]:
    if event.generation <= state.generation:
        return state, []
    actions: list[Action] = [AbortStep("the members change")] if state.phase == "training" else []
    ranks = [rank for rank, member in enumerate(event.members) if member.worker == state.worker]
    state = replace(state, generation=event.generation, phase="training" if ranks else "waiting")
    if ranks:
        members, past = tuple(event.members), tuple(event.past)
        actions.append(
            TrainGeneration(
                event.epoch,
                event.generation,
                ranks[0],
                members,
                event.transport,
                past,
                event.reported,
                event.sealed,
                tuple(event.degrees),
            )
        )
    return state, actions
