"""The words of the coordinator's decisions: a run's configuration, its state, what comes in and what goes out.

Plain values, without a rule in them; `state.py` has the rules. Everything is frozen: a new state is a new value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from distbelief.control import messages as m
from distbelief.coordinator.rules import explain
from distbelief.coordinator.rules.balance import Look, Speeds
from distbelief.coordinator.rules.detector import Pulse
from distbelief.coordinator.rules.hosts import Host, Offer
from distbelief.coordinator.rules.paged import Paged
from distbelief.coordinator.rules.progress import Progress
from distbelief.coordinator.rules.servers.fleetstate import Fleet
from distbelief.errors import DistBeliefError
from distbelief.options import RunOptions
from distbelief.strategies import parse
from distbelief.strategies.rules.degrees import Degrees, Wish

REPORTED_GRACE_S: Final = 5.0
EXIT_GRACE_S: Final = 0.3
"""An exit and the report of its cause travel on different sockets: wait this long, so that the cause is shown."""
ENGINE: Final = -1
"""As the addressee of a Send: the agents of all hosts."""

EVERYBODY: Final = -2
"""As the addressee: all that are known."""

Phase = Literal["gathering", "training", "ended"]
Status = Literal["completed", "failed", "stopped"]


class ProtocolError(DistBeliefError):
    """A message that makes no sense now. It is dropped; the run goes on."""


class RunConfig(RunOptions, frozen=True, forbid_unknown_fields=True):
    """What the coordinator knows of the run: the user's options, and what the launching process made of them."""

    strategy: str = ""
    """Its string form. Empty: one in which every member has the whole model."""
    servers: int = 0
    """Parameter servers."""
    local_workers: int = -1
    """How many of the workers the launching process starts; -1: all. With 0, other hosts have the servers too."""
    local_servers: int = -1
    """Likewise parameter servers, if the launching process starts any workers."""
    takes_hosts: bool = False
    """Whether agents of other hosts may come."""
    on_accelerators: bool = False
    """Then every worker has a state of its own, also a worker that computes on a processor."""
    transport: Literal["auto", "shm", "gloo", "nccl"] = "auto"
    exact: bool = True
    gather_timeout_s: float = 300.0
    """The longest time without any worker joining or becoming ready."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.wish  # raises for an unknown strategy

    @property
    def wish(self) -> Wish | None:
        """Of a strategy that divides the model."""
        return parse(self.strategy).wish if self.strategy else None

    @property
    def stride(self) -> int:
        """Steps that are committed together."""
        return parse(self.strategy).stride if self.strategy else 1

    @property
    def unit(self) -> str:
        """What the members divide among themselves."""
        units = {"local_sgd": "replica", "sandblaster": "portion"}
        return units.get(self.strategy.partition(":")[0], "shard")

    @property
    def balances(self) -> bool:
        """In a mesh members of one data index depend on each other: no shard can move to one of them alone."""
        return self.balance and self.wish is None


# --- events that are not messages, and outputs -----------------------------------------------------------------------


@dataclass(frozen=True)
class Ticked:
    """Time has passed; comes about ten times a second."""


@dataclass(frozen=True)
class CoordinatorFailed:
    """The coordinator itself cannot go on, e.g. its disk is full."""

    message: str
    hint: str = ""


Input = m.Event | Ticked | CoordinatorFailed


@dataclass(frozen=True)
class Send:
    worker: int
    command: m.Command


@dataclass(frozen=True)
class SendServer:
    """To a parameter server."""

    server: int
    command: m.Command


@dataclass(frozen=True)
class Record:
    """A decision for the journal; durable before anything after it in the list is performed."""

    entry: dict[str, Any]


@dataclass(frozen=True)
class Report:
    """A line for the metrics file."""

    line: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """To whoever sent the event that is being handled."""

    command: m.Command


@dataclass(frozen=True)
class Exit:
    """The run is over and everybody has been told: the coordinator may end."""

    status: Status


Output = Send | SendServer | Record | Report | Reply | Exit


# --- state -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Worker:
    number: int
    host: str = ""
    pid: int = 0
    """0 when its exit was seen before it joined."""
    gpu: str = ""
    """The accelerator that its state is on."""
    ready: bool = False
    refused: bool = False
    leaving: bool = False
    """It was asked to go, or asked itself."""
    left: bool = False
    """It has let go of the generation: nothing of it is computing or writing in there."""
    fenced: bool = False
    """It was frozen and is being killed."""
    estranged: bool = False
    """It does not answer, and nobody can kill it where it is: the others go on, and it may come back."""
    finished: m.WorkerFinished | None = None
    exited: int | None = None

    @property
    def name(self) -> str:
        return explain.who(self.number, self.host, self.pid)

    @property
    def gone(self) -> bool:
        """It certainly does nothing in the present generation any more."""
        return self.exited is not None or self.left or self.estranged

    @property
    def counts(self) -> bool:
        """It is there, and meant to stay."""
        return not (self.gone or self.refused or self.leaving)


@dataclass(frozen=True)
class Troubles:
    """What went wrong since a step was last committed, and what dead workers were doing."""

    losses: int = 0
    """Members that died."""
    broken_at: float | None = None
    """When a member said that a connection broke, and nobody is known to be dead."""
    broken: str = ""
    """What it said."""
    retries: int = 0
    """Generations that were started again for that reason."""
    killers: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """(step, shard) -> workers that died while they computed it."""
    failed_hires: int = 0
    """New workers that ended before they were ready, one after the other."""


@dataclass(frozen=True)
class OpenSave:
    """A checkpoint that is being written."""

    step: int
    generation: int
    """Whose members write it."""
    members: tuple[int, ...]
    """By rank."""
    parts: Mapping[int, m.PartSaved] = field(default_factory=dict)
    """Worker -> the part that it has written."""
    sealer: int = -1
    """Who was asked to write the manifest."""
    sealer_asked_at: float = 0.0


@dataclass(frozen=True)
class Saves:
    loaded_by: int = -1
    """The last worker that loaded a checkpoint for a generation that had no state of its own."""
    sealed: int = 0
    """The newest checkpoint's step; 0: there is none."""
    sealed_at: float | None = None
    """When it was; before there is one, when training began."""
    open: Mapping[int, OpenSave] = field(default_factory=dict)
    """Step -> the one in the making."""
    asked: int | None = None
    """The members were told to save at this step."""
    asked_at: float = 0.0
    ahead_s: float = 0.0
    """So far ahead of the members the step was named."""
    complaints: frozenset[str] = frozenset()
    """What was said about failures since the last checkpoint: it is not said again."""
    final_tries: int = 0
    """How often the last checkpoint was begun anew because a writer of it was lost."""
    final_lost: bool = False
    """The last checkpoint could not be saved; the run ends without it."""
    finished_at: float | None = None
    """Since when only the last checkpoint is missing."""
    stopping: str = ""
    """Why the run is to end as soon as a checkpoint is there."""
    stopping_at: float = 0.0


@dataclass(frozen=True)
class State:
    """Never changed in place; the mappings are replaced, not written to."""

    config: RunConfig
    epoch: int
    active_at: float
    """When a worker last joined or became ready."""
    target: int
    """How many workers there should be."""
    next_worker: int
    """The number of the next worker that is started. Numbers are never used twice."""
    generation: int = 0
    phase: Phase = "gathering"
    workers: Paged[Worker] = field(default_factory=Paged)
    reference: m.WorkerReady | None = None
    """The first worker that was ready: the others must match its job and its canary."""
    start: m.StartGeneration | None = None
    seats: Mapping[int, int] = field(default_factory=dict)
    """Member -> its rank."""
    lost: tuple[int, ...] = ()
    """Members of this generation that have died."""
    hosts: Mapping[str, Host] = field(default_factory=dict)
    """Those on which an agent can start and kill a worker and tell of its end, by name."""
    offers: Mapping[str, Offer] = field(default_factory=dict)
    """Agents of other hosts that were welcomed, by their nonces."""
    hired: Mapping[int, float] = field(default_factory=dict)
    """Workers that are to be started and have not joined yet -> when an agent was last asked to."""
    placed: Mapping[int, str] = field(default_factory=dict)
    """Those of them that an agent was asked for -> its host; empty: that of the launching process."""
    guests: frozenset[int] = frozenset()
    """Numbers that were given to workers started by hand. They may come, or not: nobody counts on them before."""
    paused: bool = False
    """There are too few workers to go on."""
    finished: int = 0
    """Members that have finished."""
    pending: Mapping[int, float] = field(default_factory=dict)
    """Worker that has exited -> until when its report of the cause is waited for."""
    progress: Progress = field(default_factory=Progress)
    pulse: Pulse = field(default_factory=Pulse)
    speeds: Speeds = field(default_factory=Speeds)
    look: Look = field(default_factory=Look)
    looked_at: float = 0.0
    troubles: Troubles = field(default_factory=Troubles)
    saves: Saves = field(default_factory=Saves)
    recoveries: int = 0
    taken_over: int = 0
    """The newest generation that told what it took over."""
    rolled_back: int = 0
    """The newest generation that had to go back to an earlier state."""
    reexecuted: int = 0
    """Steps that were executed again for that reason."""
    fleet: Fleet = field(default_factory=Fleet)
    """The parameter servers, if the strategy has any."""
    plan: tuple[str, ...] = ()
    """How the model is divided, as it was last said."""
    outcome: m.EndRun | None = None

    @property
    def members(self) -> list[m.Member]:
        return self.start.members if self.start else []

    @property
    def degrees(self) -> Degrees | None:
        """Of the present mesh, if the model is divided."""
        return Degrees(*self.start.degrees) if self.start and self.start.degrees else None

    def is_member(self, worker: int) -> bool:
        return worker in self.seats
