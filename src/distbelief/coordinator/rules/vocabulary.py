"""The values of the coordinator's decisions: a run's configuration, its state, and the machine's inputs and outputs.

Values without rules; state.py and the files beside it have the rules. Everything is frozen: a new state is a new value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from distbelief.control import messages as m
from distbelief.coordinator.rules import explain
from distbelief.coordinator.rules.balance import Look, Speeds
from distbelief.coordinator.rules.detector import Pulse
from distbelief.coordinator.rules.paged import Paged
from distbelief.coordinator.rules.progress import Progress
from distbelief.coordinator.rules.restarts import Restarts
from distbelief.coordinator.rules.servers.fleet import Fleet
from distbelief.errors import DistBeliefError
from distbelief.options import RunOptions
from distbelief.strategies import parse
from distbelief.strategies.base import Strategy
from distbelief.strategies.rules.degrees import Degrees, Wish
from distbelief.transport.rules.choice import Wished

REPORTED_GRACE_S: Final = 5.0
"""How long to wait for the cause of an exit whose status says that the cause is reported."""
EXIT_GRACE_S: Final = 0.3
"""How long to wait after other exit codes: the exit and the report of its cause travel on different sockets."""
ENGINE: Final = -1
"""As the addressee of a Send: the agents of all hosts."""
EVERYBODY: Final = -2
"""As the addressee: all workers (Send) or all servers (SendServer) that are known."""
NO_LIMIT: Final = -1
"""As a host's room."""

Phase = Literal["gathering", "training", "ended"]
Status = Literal["completed", "failed", "stopped"]


class ProtocolError(DistBeliefError):
    """A message that makes no sense in the present state. It is dropped; the run goes on."""


class _Unnamed(Strategy):
    """The strategy of a run that names none: the answers of the base class."""

    on_workers = ""
    exact = True
    transport = "auto"


class RunConfig(RunOptions, frozen=True, forbid_unknown_fields=True):
    """The run as the coordinator knows it: the user's options, and the values that the launching process derived from
    them."""

    strategy: str = ""
    """The strategy's string form. Empty: a strategy in which every member has the whole model."""
    servers: int = 0
    """The number of parameter servers."""
    local_workers: int = -1
    """How many of the workers the launching process starts; -1: all. With 0 it starts no servers either."""
    local_servers: int = -1
    """How many parameter servers the launching process starts, if it starts any workers; -1: all."""
    takes_hosts: bool = False
    """Whether agents of other hosts may join."""
    on_accelerators: bool = False
    """Whether the run's state is on accelerators. Then every worker has its own state, even a worker on a processor."""
    transport: Wished = "auto"
    exact: bool = True
    gather_timeout_s: float = 300.0
    """The longest time before the start without any worker joining or becoming ready."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.parsed_strategy  # raises for an unknown strategy

    @property
    def parsed_strategy(self) -> Strategy:
        """The strategy as a value, which answers the coordinator's questions."""
        return parse(self.strategy) if self.strategy else _Unnamed()

    @property
    def wish(self) -> Wish | None:
        """How the strategy divides the model; None: every member has the whole model."""
        return self.parsed_strategy.wish

    @property
    def stride(self) -> int:
        """Steps that are committed together."""
        return self.parsed_strategy.stride

    @property
    def unit(self) -> str:
        """The name, for people, of the unit of work that members divide among themselves."""
        return self.parsed_strategy.work_unit

    @property
    def balances(self) -> bool:
        """False where the model is divided: the members of one data index depend on each other, so no shard can move to
        one of them alone."""
        return self.balance and self.wish is None


# --- events that are not messages, and outputs -----------------------------------------------------------------------


@dataclass(frozen=True)
class Ticked:
    """Time has passed; an input about ten times a second."""


@dataclass(frozen=True)
class CoordinatorFailed:
    """The coordinator itself cannot go on, for example because its disk is full."""

    message: str
    hint: str = ""


Input = m.Event | Ticked | CoordinatorFailed


@dataclass(frozen=True)
class Send:
    worker: int
    command: m.Command


@dataclass(frozen=True)
class SendServer:
    """Send a command to a parameter server."""

    server: int
    command: m.Command


@dataclass(frozen=True)
class Record:
    """A decision for the journal: it is durable before any later output in the list is performed."""

    entry: dict[str, Any]


@dataclass(frozen=True)
class Report:
    """A line for the metrics file."""

    line: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """Send a command to the sender of the present event."""

    command: m.Command


@dataclass(frozen=True)
class Exit:
    """The run is over and all processes have been told: the coordinator may end."""

    status: Status


Output = Send | SendServer | Record | Report | Reply | Exit


# --- state -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    """A host whose agent has reported."""

    name: str
    heard_at: float
    room: int = NO_LIMIT
    """The most workers that it takes."""
    server_room: int = NO_LIMIT
    """The most parameter servers that it takes."""


@dataclass(frozen=True)
class Offer:
    """The agent of another host that has joined under this name."""

    host: str
    grows: bool = False
    """Whether the target rises by the host's spare slots when it first reports."""
    added: int = 0
    """By how much the target rose."""
    asked: str = ""
    """The name of its machine, by which the agent had asked; a second agent of a machine is given another name."""


@dataclass(frozen=True)
class Worker:
    number: int
    host: str = ""
    pid: int = 0
    """0: the worker's exit was reported before it joined."""
    gpu: str = ""
    """The accelerator that holds the worker's state."""
    ready: bool = False
    refused: bool = False
    leaving: bool = False
    """The worker is to leave, because it received SIGTERM or the run was scaled."""
    left: bool = False
    """The worker has left the generation, and computes and writes nothing more there."""
    fenced: bool = False
    """The worker was frozen and is being killed."""
    estranged: bool = False
    """The worker does not answer and cannot be killed: the others go on without the worker, which may come back."""
    finished: m.WorkerFinished | None = None
    exited: int | None = None

    @property
    def name(self) -> str:
        return explain.who(self.number, self.host, self.pid)

    @property
    def gone(self) -> bool:
        """Whether the worker certainly does nothing in the present generation any more."""
        return self.exited is not None or self.left or self.estranged

    @property
    def counts(self) -> bool:
        """Whether the worker is alive and meant to stay."""
        return not (self.gone or self.refused or self.leaving)


@dataclass(frozen=True)
class Troubles:
    """Failures since the last committed step, and the shards that dead workers were computing."""

    losses: int = 0
    """Members that died."""
    broken_at: float | None = None
    """When a member reported a broken connection while no member was known to be dead."""
    broken: str = ""
    """The text of that report."""
    retries: int = 0
    """Generations that were started because of broken connections."""
    killers: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """(step, shard) -> workers that died while they computed it."""
    failed_hires: int = 0
    """New workers in a row that ended before they were ready."""
    refused: int = 0
    """Workers in a row that a host could not start."""


@dataclass(frozen=True)
class OpenSave:
    """A checkpoint that is being written."""

    step: int
    generation: int
    """The generation whose members write it."""
    members: tuple[int, ...]
    """By rank."""
    parts: Mapping[int, m.PartSaved] = field(default_factory=dict)
    """Worker -> the part that it has written."""
    sealer: int = -1
    """The worker that was asked to write the manifest."""
    sealer_asked_at: float = 0.0


@dataclass(frozen=True)
class Saves:
    loaded_by: int = -1
    """The last worker that loaded a checkpoint for a generation that had no state of its own."""
    sealed: int = 0
    """The newest checkpoint's step; 0: none exists."""
    sealed_at: float | None = None
    """When it was sealed; before the first one, when training began."""
    open: Mapping[int, OpenSave] = field(default_factory=dict)
    """Step -> the checkpoint that is being written."""
    asked: int | None = None
    """The step at which the members were told to save."""
    asked_at: float = 0.0
    ahead_s: float = 0.0
    """How far ahead of the members that step was chosen."""
    complaints: frozenset[str] = frozenset()
    """The causes of failures that were reported since the last checkpoint: each is reported once."""
    final_tries: int = 0
    """How often the last checkpoint was restarted because a writer of it was lost."""
    final_lost: bool = False
    """The last checkpoint could not be saved; the run ends without it."""
    finished_at: float | None = None
    """Since when only the last checkpoint is missing."""
    stopping: str = ""
    """Why the run is to end as soon as a checkpoint is saved."""
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
    """The report of the first ready worker: the others must match its job and its canary."""
    start: m.StartGeneration | None = None
    seats: Mapping[int, int] = field(default_factory=dict)
    """Member -> its rank."""
    lost: tuple[int, ...] = ()
    """Members of this generation that have died."""
    hosts: Mapping[str, Host] = field(default_factory=dict)
    """The hosts whose agents have reported, by name."""
    offers: Mapping[str, Offer] = field(default_factory=dict)
    """The agents of other hosts that have joined, by nonce."""
    hired: Mapping[int, float] = field(default_factory=dict)
    """Workers that are to be started and have not joined yet -> when an agent was last asked to start them."""
    placed: Mapping[int, str] = field(default_factory=dict)
    """Hired workers for which an agent was asked -> its host; empty: the launching process."""
    arriving: frozenset[int] = frozenset()
    """Numbers given to manually started workers that have not joined yet: the target does not include them."""
    paused: bool = False
    """Whether the run waits because it has fewer than `min_workers` workers."""
    finished: int = 0
    """Members that have finished."""
    pending: Mapping[int, float] = field(default_factory=dict)
    """Exited worker -> until when the coordinator waits for a report of the cause."""
    progress: Progress = field(default_factory=Progress)
    pulse: Pulse = field(default_factory=Pulse)
    speeds: Speeds = field(default_factory=Speeds)
    look: Look = field(default_factory=Look)
    looked_at: float = 0.0
    troubles: Troubles = field(default_factory=Troubles)
    restarts: Restarts = field(default_factory=Restarts)
    saves: Saves = field(default_factory=Saves)
    recoveries: int = 0
    taken_over: int = 0
    """The newest generation that reported a takeover."""
    rolled_back: int = 0
    """The newest generation that went back to an earlier state."""
    reexecuted: int = 0
    """Steps that were executed again after going back."""
    fleet: Fleet = field(default_factory=Fleet)
    """The parameter servers, if the strategy has any."""
    plan: tuple[str, ...] = ()
    """How the model is divided, as last reported."""
    outcome: m.EndRun | None = None

    @property
    def members(self) -> list[m.Member]:
        return self.start.members if self.start else []

    @property
    def degrees(self) -> Degrees | None:
        """How many ways the model is divided now; None: every member has the whole model."""
        return Degrees(*self.start.degrees) if self.start and self.start.degrees else None

    def is_member(self, worker: int) -> bool:
        return worker in self.seats
