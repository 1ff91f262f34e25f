"""The interface between the worker's machinery and a strategy.

A `Strategy` is a value without torch, which says what the strategy needs. `prepare` makes and checks the model on a
worker, `Prepared.build` gives a replica once the worker has a seat in a generation, and the replica trains: `compute`
turns shards into partial sums, `commit` adds the partial sums over the members and updates. `Training` and `ServerHost`
are what the machinery does for a strategy that has a training loop, or a server process, of its own.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from distbelief.errors import DistBeliefError
from distbelief.job import Job
from distbelief.shards import Range, Schedule
from distbelief.strategies.rules.degrees import Wish

if TYPE_CHECKING:
    import torch

    from distbelief.checkpoint.manifest import PartEntry
    from distbelief.checkpoint.parts import Slice
    from distbelief.control.credentials import Credential
    from distbelief.control.messages import ServerMap, WorkerFinished
    from distbelief.transport.exchange import Group
    from distbelief.transport.membership import Membership
    from distbelief.transport.shm.segment import Segment, SegmentClient

Fetch = Callable[[int, int, int], tuple[Any, int]]
"""(step, first shard, end shard) -> the batch of those shards together, and how many samples it has."""


class Division(Protocol):
    """How one step is divided into units of work for the members."""

    @property
    def shards(self) -> int: ...

    def occupied(self, step: int) -> int:
        """The number n of units of that step that have samples; they are the first n."""


@dataclass(frozen=True)
class Task:
    """A shard to compute."""

    number: int
    samples: int
    seed: int
    fetch: Callable[[], tuple[Any, int]]
    counts: bool = True
    """Members that must do as much as others, and have fewer shards, fill up with some that do not count."""


@dataclass(frozen=True)
class StepResult:
    loss: float
    samples: int
    fingerprint: str
    """Equal wherever and whenever this step is executed; kept with the step."""
    before: Sequence[StepResult] = ()
    """Of the steps that were committed together with this one, in front of it."""


@dataclass(frozen=True)
class Applied:
    """What a step gave, as it is kept with the state."""

    step: int
    loss: float
    samples: int
    fingerprint: str
    generation: int
    """In which it was applied."""
    at: float
    """Wall clock."""


@dataclass(frozen=True)
class Saved:
    """A state to begin from: that of a checkpoint, or weights alone."""

    step: int
    """Steps applied."""
    tensors: Mapping[str, torch.Tensor]
    """`model/NAME`, `optimizer/KEY/NAME`, `begun/NAME` (see namedtensors.py); weights alone: `model/NAME` only."""
    history: Sequence[Applied] = ()
    """What the last steps gave, oldest first: steps whose report may have been lost when the coordinator died."""
    note: bytes = b""
    """The note that was kept with this state, if there was one."""


class BeginFrom(Protocol):
    """Called where nobody has the run's state, by the member that leads; None: the job's own initial values."""

    def __call__(self, step: int = -1) -> Saved | None:
        """`step`: that of the checkpoint that the leading member has found, for others who read from it too."""


def nothing_saved(step: int = -1) -> Saved | None:
    return None


@dataclass(frozen=True)
class RolledBack:
    reached: int
    """Steps that had been applied."""
    step: int
    """Steps that are applied now."""
    source: str
    """snapshots · checkpoint"""


class Portion(Protocol):
    """What one member saves of a state. It outlives the replica: it knows names and places, no values."""

    @property
    def size_bytes(self) -> int:
        """The memory that a copy of it takes."""

    def entries(self) -> list[PartEntry]: ...

    def slices(self, copy: Segment, outside: Mapping[str, torch.Tensor]) -> list[Slice]:
        """The tensors in a copy that was made with `Replica.copy_portion`."""


class Copying(Protocol):
    """A copy of a portion in the making. The replica finishes it before it writes to what is copied."""

    outside: Mapping[str, torch.Tensor]
    """What is not in that memory, for `Portion.slices`: small tensors, and such as never change."""
    waited_s: float
    """How long training waited for it."""

    def run(self) -> None:
        """Copy what is left. For a thread beside training."""

    def finish(self) -> None:
        """Copy what is left, and return when all is there."""


@dataclass(frozen=True)
class Takeover:
    """A step that an earlier generation began and this one finishes."""

    step: int
    recomputed: int
    """Shards that had to be computed again; the others' partial sums were there."""
    is_in_part: bool = False
    """Whether some of the state has the step behind it already: until it is finished, there is nothing to look at."""


class NonFiniteLoss(DistBeliefError):
    """The loss is NaN or infinite. Raised on every member before the step is applied."""

    def __init__(self, value: float, step: int, shard: int) -> None:
        super().__init__(
            f"the loss is {value} at step {step}, shard {shard}; the step was not applied",
            hint="`distbelief replay RUN` shows the layer and the samples; clip_norm or a lower learning rate may help",
        )
        self.step = step
        self.shard = shard


@dataclass(frozen=True)
class Seat:
    """A member's place in a generation."""

    rank: int
    ranges: Sequence[Range]
    """Every rank's shards."""
    steps: int
    """How many steps the run has: what lies beyond is not looked at."""
    generation: int = 0
    degrees: Sequence[int] = ()
    """Of the mesh that the members form, where the strategy divides the model."""
    workers: Sequence[int] = ()
    """The number of every member, by rank."""

    @property
    def worker(self) -> int:
        return self.workers[self.rank]


class Seated(Protocol):
    """A member's part of a run, whatever the members do together."""

    @property
    def exchange(self) -> Group: ...

    comm_s: float
    """Seconds spent on adding up and on waiting for others, since it was built."""

    def steps_applied(self) -> int: ...

    def taken_over(self) -> Takeover | None:
        """What this generation found begun when it started."""

    def remembered(self, first: int) -> list[Applied]:
        """The results of the applied steps from `first` on, as far back as they are kept, by any member."""

    def note(self) -> tuple[int, bytes]:
        """(steps applied when the note was kept, content). A note survives the member that kept it."""

    def keep_note(self, content: bytes) -> None:
        """Keep some bytes that belong to the present state. Members that share a state leave it to rank 0."""

    def portions(self) -> Sequence[Portion]:
        """Who saves what: each member's part of the state, by rank."""

    def copy_portion(self, applied: int, into: Segment) -> Copying:
        """Begin a copy of this member's portion of the state after `applied` steps, which were just applied. The copy
        must be finished before this member leaves its generation."""

    def measure(self, tasks: Sequence[Task], measure: Callable[[Task, Any, Any], None]) -> None:
        """Forward passes at the committed state, of all these shards over all members. `measure` is called with (task,
        output, target) on the members that have the outputs."""

    def save_weights(self, path: Path) -> None:
        """Collective call; rank 0 writes."""

    def weights_sha256(self) -> str:
        """Collective call; returns an empty string on members without weights."""

    def waits(self) -> Mapping[int, float]:
        """Seconds that were spent waiting for each rank, where that is known."""

    def traffic(self) -> tuple[int, int]:
        """(bytes of gradients that all members sent, bytes that they would have sent uncompressed); 0: not known."""

    def helped(self) -> int:
        """Shards that this member has computed for late ones."""

    def plan_lines(self) -> Sequence[str]:
        """How the model is divided, for people: what is new since it was last asked."""

    def rolled_back(self) -> RolledBack | None:
        """That it had to go back to an earlier step, because nobody had the last one any more."""


@runtime_checkable
class Replica(Seated, Protocol):
    """Of members that do steps together."""

    def compute(self, step: int) -> None:
        """Forward and backward of my shards of that step, into named partial sums. Where several steps are committed
        together, all of them, from that one on."""

    def commit(self, step: int) -> StepResult:
        """Add the partial sums of all members and update. Atomic: applied whole or not at all. Returns what the last
        step gave that is applied now."""


class Prepared(Protocol):
    """A model that has been made and checked on this worker, before it has a seat."""

    model: torch.nn.Module
    shards: int
    """How many units of work the members divide among themselves."""

    @property
    def parameters(self) -> int: ...

    def least_bytes(self) -> int:
        """The memory that one worker needs at least, beside the model itself."""

    def facts(self) -> dict[str, str]:
        """What must be the same on all members for the bits to be the same."""

    def canary(self, fetch: Fetch) -> str: ...

    def groups(self, mine: Range) -> list[list[Range]]:
        """What a member with that range fetches: shards, in groups. It goes through the steps that are committed
        together with one group after the other; within a step it takes a group's shards in order."""

    @property
    def loop(self) -> Loop | None:
        """The training loop of its members; None: the worker's own, one step after the other."""

    def connect(self, credential: Credential) -> ServerLink | None:
        """Begin to look for the parameter servers; None: there are none."""

    def exchange(self, membership: Membership) -> Group:
        """Open what the members of a generation meet in."""

    def frozen(self) -> list[str]:
        """Parameters that are not trained, as `model/NAME`. Every member has its own."""

    def set_frozen(self, tensors: Mapping[str, torch.Tensor]) -> None: ...

    def build(self, seat: Seat, exchange: Any, fetch: Fetch, begin_from: BeginFrom = nothing_saved) -> Seated: ...

    def let_go(self) -> None:
        """The generation is over: what it had is not held from here any more, before the next one takes as much."""


class ServerLink(Protocol):
    """A worker's connection to the parameter servers, as far as the coordinator's map of them goes."""

    @property
    def version(self) -> int:
        """Of the map that is known here."""

    def learn(self, known: ServerMap) -> None:
        """The coordinator has a newer map."""


class MeasureAll(Protocol):
    def __call__(self, tasks: Sequence[Task], measure: Callable[[Task, Any, Any], None]) -> None:
        """Forward passes of this member's part of the tasks; see `Seated.measure`."""


class Training(Protocol):
    """What the worker does for a strategy's own training loop during one generation: it reads samples, reports,
    evaluates and saves."""

    @property
    def job(self) -> Job: ...
    @property
    def worker(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def run_dir(self) -> Path: ...
    @property
    def reported(self) -> int:
        """The coordinator knows of all steps before this one."""

    @property
    def evaluates(self) -> bool:
        """Whether the job has validation data."""

    @property
    def data_s(self) -> float:
        """Seconds that this member has waited for samples, since `begin`."""

    @property
    def samples_per_s(self) -> float: ...

    def begin(self) -> None:
        """Set the counts of this generation to 0. After what `build` and an evaluation have read."""

    def last_evaluation(self) -> dict[str, float]:
        """What the last evaluation gave, as it is kept with the run's state."""

    def answer_recalls(self) -> None:
        """From now on this member reports steps again when the coordinator asks for them."""

    def report(self, one: Applied) -> None:
        """Tell the coordinator what a step gave."""

    def reached(self, applied: int, counted: int) -> None:
        """Tell the coordinator how many steps are applied. `counted`: the number of the next step in a profile."""

    def spent(self, compute_s: float, pace: Sequence[int]) -> None:
        """Tell the coordinator where this member's time went. `pace`: what it has chosen for itself, if anything."""

    def trained(self, seconds: float, samples: int) -> None:
        """Count towards the samples per second of this process."""

    def show(self, lines: Sequence[str]) -> None:
        """Tell people how the run is laid out."""

    def evaluate(self, applied: int, alone: MeasureAll | None = None) -> dict[str, float]:
        """Evaluate the present state, keep the result with it and report it as that of `applied` steps. Every member
        calls it; or one member alone, with a function that measures all shards."""

    def save_wished(self) -> int:
        """The step at which a checkpoint was asked for and not taken yet; -1: none was asked for."""

    def is_save_due(self, applied: int) -> bool:
        """Whether the plan of checkpoints includes the state after `applied` steps."""

    def save(self, applied: int, last: bool = False) -> None:
        """Have this member's portion of the present state copied and written."""


Loop = Callable[[Any, Training], "WorkerFinished"]
"""A training loop: (the member that `Prepared.build` gave, what the worker does for it) -> what is reported at the end.
"""


@dataclass(frozen=True)
class ServerJob:
    """What the process of a parameter server knows of the job."""

    job: Job
    schedule: Schedule
    steps: int
    prepared: Any
    """As the strategy's own `prepare` has made it, on the host's processor."""


class ServerHost(Protocol):
    """What the worker's machinery does for the process of a parameter server."""

    @property
    def worker(self) -> int:
        """The number of this server."""

    @property
    def host(self) -> str: ...

    @property
    def address(self) -> str:
        """The coordinator's."""

    @property
    def credential(self) -> Credential: ...

    @property
    def segments(self) -> SegmentClient | None:
        """Where shared memory comes from. None: workers are on other hosts and could not map it."""

    @property
    def saves_every(self) -> int:
        """Steps between two checkpoints; 0: the plan names none."""

    def load(self) -> ServerJob: ...

    def saved(self, life: int, sealed: int, lazily: bool = False) -> Saved | None:
        """The state that this life of the servers begins from; None: the job's own initial values. `sealed`: the newest
        checkpoint of the run. `lazily`: tensors are read when they are asked for."""


Phase = Literal["data", "forward", "backward", "reduce", "optimizer", "wait", "evaluation", "checkpoint"]
"""What a worker's time is spent on, in a profile."""


@dataclass(frozen=True)
class Instrument:
    """Functions whose time counts for a phase while a profile is recorded. Modules are named, not imported."""

    phase: Phase
    module: str
    owner: str
    """A class; its subclasses are included. Empty: the functions are module-level."""
    names: tuple[str, ...]
    is_context: bool = False
    """Whether the functions return context managers: the time of the `with` block counts."""


class Strategy(ABC):
    """How a job is learnt: a frozen value with a string form that its parser reads again. It answers what launcher,
    coordinator, worker and tools must know; they never ask which strategy it is. The answers here are those of a
    strategy like allreduce. The module of a strategy's value imports no torch; what runs on workers and servers is in
    modules of its own, which are named here and imported there."""

    on_workers: ClassVar[str]
    """The module of the workers' side. It has a function `prepare(strategy, job, schedule, device)`, which returns a
    `Prepared`."""
    keeps_freed_memory: ClassVar[bool] = False
    """Whether workers keep the memory that a step frees for the next step, in huge pages. False: it goes back to the
    system, on which strategies that divide the model count."""
    instruments: ClassVar[tuple[Instrument, ...]] = ()
    """The strategy's own functions that a profile times, beside those of the worker and of the transports."""
    on_servers: ClassVar[str] = ""
    """The module of the servers' side, where there are any. It has a function `serve(host)`, see `serve`."""

    plain_loop: ClassVar[str] = "batches"
    """Which loop in one process learns the same (verification/process.py): `batches` (one global batch after the
    other), `rounds` (rounds of local steps) or `search` (L-BFGS)."""

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether the weights are the same bits for any number of workers."""

    @property
    @abstractmethod
    def transport(self) -> str:
        """How members meet: shm (memory of one host), gloo, nccl, or auto."""

    @property
    def learning(self) -> str:
        """What is learnt, however it runs: a run goes on from a checkpoint of another strategy if both answer alike.
        Empty: what the job's own optimizer learns, one global batch after the other."""
        return ""

    @property
    def stride(self) -> int:
        """Steps that are committed together: there is a state after every multiple of it, and at the end."""
        return 1

    @property
    def work_unit(self) -> str:
        """What people call a unit of the work that the members divide among themselves."""
        return "shard"

    @property
    def in_steps(self) -> bool:
        """Whether the members compute each step together. False: each takes whole batches, and nobody waits."""
        return True

    @property
    def balances(self) -> bool:
        """Whether shards can be moved from one member to another between two steps. False: members take their work
        themselves."""
        return self.in_steps

    @property
    def servers(self) -> int:
        """How many parameter servers the run has."""
        return 0

    @property
    def wish(self) -> Wish | None:
        """How many ways the model and its data are divided among the members; None: every member has all of it."""
        return None

    def usual_workers(self, wanted: int) -> int:
        """The number of workers near `wanted` with which the strategy can start."""
        wish = self.wish
        if wish is None:
            return wanted
        return max(wanted // wish.unit, 1) * wish.unit if wish.is_open else wish.unit

    @property
    def fuses_shards(self) -> bool:
        """Whether a member computes its shards of a step together, as one batch."""
        return False

    @property
    def state_on_device(self) -> bool:
        """Whether members have the run's state where they compute. False: the state is in the memory of hosts, and
        accelerators have copies of the parameters."""
        return False

    @property
    def no_replay(self) -> str:
        """Why one process cannot compute a single step again; empty: it can."""
        return ""

    def schedule_of(self, job: Job, samples: int) -> Schedule:
        """The samples of each step, for a data set of `samples` samples."""
        return Schedule(samples, job.global_batch, job.resolved_shards, job.drop_last)

    def prepare(self, job: Job, schedule: Schedule, device: torch.device) -> Prepared:
        """Make and check the model, on a worker."""
        prepared: Prepared = importlib.import_module(self.on_workers).prepare(self, job, schedule, device)
        return prepared

    def serve(self, host: ServerHost) -> int:
        """The life of one of the `servers`, a process. Returns its exit status."""
        status: int = importlib.import_module(self.on_servers).serve(host)
        return status
