"""The interface between the worker's machinery and a strategy.

A `Strategy` is a torch-free value that describes the strategy's needs. `prepare` makes and checks the model on a
worker, `Prepared.build` makes a replica once the worker has a seat in a generation, and the replica trains: `compute`
turns shards into partial sums, `commit` adds them over the members and updates. `Training` and `ServerHost` are the
machinery's services for a strategy with its own training loop or server process.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from distbelief.instrument import Instrument
from distbelief.job import Job
from distbelief.options import NEVER, RecheckPlan
from distbelief.shards import Range, Schedule
from distbelief.strategies.rules.degrees import Wish

if TYPE_CHECKING:
    import torch

    from distbelief.checkpoint.manifest import PartEntry
    from distbelief.checkpoint.parts import Slice
    from distbelief.control.credentials import Credential
    from distbelief.control.messages import ServerMap, WorkerFinished
    from distbelief.strategies.purity import Checked
    from distbelief.transport.exchange import Group
    from distbelief.transport.membership import Membership
    from distbelief.transport.shm.segment import Segment, SegmentClient

Fetch = Callable[[int, int, int], tuple[Any, int]]
"""(step, first shard, end shard) -> the batch of these shards together, and its number of samples."""

REMEMBERED = 1024
"""Number of steps (or batches) whose results are kept: many more than are committed between two heartbeats."""


class Division(Protocol):
    """How one step is divided into units of work for the members."""

    @property
    def shards(self) -> int: ...

    def occupied(self, step: int) -> int:
        """The number n of units of the step that have samples; they are the first n."""


@dataclass(frozen=True)
class Task:
    """A shard to compute."""

    number: int
    samples: int
    seed: int
    fetch: Callable[[], tuple[Any, int]]
    counts: bool = True
    """False: padding, so that all members run the same number of tasks."""


@dataclass(frozen=True)
class StepResult:
    loss: float
    samples: int
    fingerprint: str
    """The same in every execution of this step; kept with the step."""
    before: Sequence[StepResult] = ()
    """The results of the earlier steps that were committed together with this one."""


@dataclass(frozen=True)
class Applied:
    """The result of a step, as the state keeps it."""

    step: int
    loss: float
    samples: int
    fingerprint: str
    generation: int
    """The generation in which the step was applied."""
    at: float
    """Wall-clock time of the commit."""


@dataclass(frozen=True)
class Saved:
    """A state to start from: a checkpoint, or weights alone."""

    step: int
    """The number of applied steps."""
    tensors: Mapping[str, torch.Tensor]
    """`model/NAME`, `optimizer/KEY/NAME`, `begun/NAME` (see namedtensors.py); weights alone: `model/NAME` only."""
    history: Sequence[Applied] = ()
    """The last steps' results, oldest first: a coordinator that died may not have received them."""
    note: bytes = b""
    """The note kept with this state; empty: none."""


class BeginFrom(Protocol):
    """Called by the leading member when no member has the run's state. None: use the job's own initial values."""

    def __call__(self, step: int = -1) -> Saved | None:
        """`step`: the checkpoint that the leading member has found, for other members that read from it too."""


def nothing_saved(step: int = -1) -> Saved | None:
    return None


@dataclass(frozen=True)
class RolledBack:
    reached: int
    """The number of steps that had been applied."""
    step: int
    """The number of steps that are applied now."""
    source: str
    """Where that state came from: `checkpoint`, or the strategy's own word (`Strategy.source_text`)."""


class Portion(Protocol):
    """The part of a state that one member saves. It holds names and offsets, no values, so it outlives the replica."""

    @property
    def size_bytes(self) -> int:
        """The size of a copy."""

    def entries(self) -> list[PartEntry]: ...

    def slices(self, copy: Segment, outside: Mapping[str, torch.Tensor]) -> list[Slice]:
        """The tensors in a copy made by `Replica.copy_portion`."""


class Copying(Protocol):
    """An unfinished copy of a portion. The replica finishes it before it writes to the copied memory."""

    outside: Mapping[str, torch.Tensor]
    """Tensors outside of the copied memory, for `Portion.slices`: small ones and constant ones."""
    waited_s: float
    """Seconds that training waited for the copy."""

    def run(self) -> None:
        """Copy the remaining pieces, in a thread beside training."""

    def finish(self) -> None:
        """Copy the remaining pieces, and return when the copy is complete."""


@dataclass(frozen=True)
class Takeover:
    """A step that an earlier generation began and this one finishes."""

    step: int
    recomputed: int
    """The number of recomputed shards; partial sums of the others had been published."""
    is_in_part: bool = False
    """Whether a part of the state has the step already; until the step is finished, the state is unusable."""


@dataclass(frozen=True)
class Seat:
    """A member's place in a generation."""

    rank: int
    ranges: Sequence[Range]
    """Each rank's shards."""
    steps: int
    """The number of steps of the run; no batch beyond it is prefetched."""
    generation: int = 0
    degrees: Sequence[int] = ()
    """The degrees of the members' mesh, if the strategy divides the model."""
    workers: Sequence[int] = ()
    """Each member's worker number, by rank."""
    hosts: Sequence[str] = ()
    """Each member's host, by rank."""
    recheck: RecheckPlan = NEVER
    """Which steps the members recheck; default: none."""

    @property
    def worker(self) -> int:
        return self.workers[self.rank]


class Seated(Protocol):
    """A member's part of a run, whether or not the members compute steps together."""

    @property
    def exchange(self) -> Group: ...

    comm_s: float
    """Seconds of adding up partial sums and of waiting for other members, since the replica was built."""

    def steps_applied(self) -> int: ...

    def taken_over(self) -> Takeover | None:
        """The unfinished step that this generation took over, if any."""

    def remembered(self, first: int) -> list[Applied]:
        """The results of the applied steps from `first` on, as far back as the state keeps them. Any member has
        them."""

    def note(self) -> tuple[int, bytes]:
        """(steps applied when the note was kept, content). A note survives the death of its writer."""

    def keep_note(self, content: bytes) -> None:
        """Keep some bytes with the present state. Members that share a state leave it to rank 0."""

    def portions(self) -> Sequence[Portion]:
        """Each member's portion of the state, by rank."""

    def copy_portion(self, applied: int, into: Segment) -> Copying:
        """Begin a copy of this member's portion of the state, right after `applied` steps were applied. The copy must
        be finished before the member leaves its generation."""

    def measure(self, tasks: Sequence[Task], measure: Callable[[Task, Any, Any], None]) -> None:
        """Forward passes of all these shards over all members, at the committed state. Members that have the outputs
        call `measure` with (task, output, target)."""

    def save_weights(self, path: Path) -> None:
        """Collective call; rank 0 writes."""

    def weights_sha256(self) -> str:
        """Collective call; returns an empty string on members without weights."""

    def waits(self) -> Mapping[int, float]:
        """Seconds of waiting for each rank, where they are known."""

    def traffic(self) -> tuple[int, int]:
        """(bytes of gradients that all members sent, bytes without compression); 0: unknown."""

    def helped(self) -> int:
        """The number of shards that this member computed for late members."""

    def plan_lines(self) -> Sequence[str]:
        """New lines for people about how the model is divided, since the last call."""

    def rolled_back(self) -> RolledBack | None:
        """The rollback to an earlier step, if no member had the last state any more."""


@runtime_checkable
class Replica(Seated, Protocol):
    """A replica of members that compute steps together."""

    def compute(self, step: int) -> None:
        """Forward and backward passes of this member's shards of the step, into partial sums. With a stride: of all
        steps that are committed together, beginning with `step`."""

    def commit(self, step: int) -> StepResult:
        """Add the partial sums of all members and update. Atomic: the step is applied whole or not at all. Returns the
        result of the last applied step."""


class Prepared(Protocol):
    """A made and checked model on a worker without a seat."""

    model: torch.nn.Module
    shards: int
    """The number of units of work that the members divide among themselves."""

    @property
    def parameters(self) -> int: ...

    def least_bytes(self) -> int:
        """The memory that one worker needs at least, without the model itself."""

    def facts(self) -> dict[str, str]:
        """The facts that must be equal on all members for equal bits."""

    def canary(self, fetch: Fetch) -> str: ...

    def checked_canary(self, fetch: Fetch) -> Checked:
        """The canary, and why its shard does not always have the same result (strategies/purity). For exact
        strategies; `fetch` returns a batch of its own at each call."""

    def groups(self, mine: Range) -> list[list[Range]]:
        """The shards that a member with this range fetches, as groups of ranges. The member computes all steps that are
        committed together with one group, then with the next; within a step it takes a group's shards in order."""

    @property
    def loop(self) -> Loop | None:
        """The strategy's own training loop; None: the worker's loop, one step after the other."""

    def connect(self, credential: Credential) -> ServerLink | None:
        """Connect to the parameter servers; None: the strategy has none."""

    def exchange(self, membership: Membership) -> Group:
        """Open the generation's exchange."""

    def frozen(self) -> list[str]:
        """The parameters that are not trained, as `model/NAME`. Every member has its own copy."""

    def set_frozen(self, tensors: Mapping[str, torch.Tensor]) -> None: ...

    def build(self, seat: Seat, exchange: Any, fetch: Fetch, begin_from: BeginFrom = nothing_saved) -> Seated: ...

    def let_go(self) -> None:
        """A generation has ended: release its memory before the next one allocates."""


class ServerLink(Protocol):
    """A worker's connection to the parameter servers, by the coordinator's map."""

    @property
    def version(self) -> int:
        """The version of this worker's map."""

    def learn(self, known: ServerMap) -> None:
        """Adopt a newer map of the coordinator."""


class MeasureAll(Protocol):
    def __call__(self, tasks: Sequence[Task], measure: Callable[[Task, Any, Any], None]) -> None:
        """Forward passes of this member's part of the tasks; see `Seated.measure`."""


class Training(Protocol):
    """The worker's services for a strategy's own training loop in one generation: samples, reports, evaluations,
    checkpoints."""

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
        """The coordinator has reports of all steps before this one."""

    @property
    def evaluates(self) -> bool:
        """Whether the job has validation data."""

    @property
    def data_s(self) -> float:
        """Seconds that this member waited for samples since `begin`."""

    @property
    def samples_per_s(self) -> float: ...

    def begin(self) -> None:
        """Reset the generation's counters, after the reads of `build` and of an evaluation."""

    def last_evaluation(self) -> dict[str, float]:
        """The last evaluation's metrics, kept with the run's state."""

    def answer_recalls(self) -> None:
        """From now on this member repeats step reports when the coordinator asks for them."""

    def report(self, one: Applied) -> None:
        """Report a step's result to the coordinator."""

    def reached(self, applied: int, counted: int) -> None:
        """Report the number of applied steps. `counted`: the next step's number in a profile."""

    def spent(self, compute_s: float, pace: Sequence[int]) -> None:
        """Report this member's computing time. `pace`: the pace that the member has chosen, if it chooses one."""

    def trained(self, seconds: float, samples: int) -> None:
        """Count these samples towards the samples per second of this process."""

    def show(self, lines: Sequence[str]) -> None:
        """Print lines about the run's layout."""

    def evaluate(self, applied: int, alone: MeasureAll | None = None) -> dict[str, float]:
        """Evaluate the present state, keep the metrics with it, and report them for `applied` steps. All members call
        it, or one member alone with a function that measures all shards."""

    def save_wished(self) -> int:
        """The step of a requested checkpoint that is not taken yet; -1: none."""

    def is_save_due(self, applied: int) -> bool:
        """Whether the save plan has a checkpoint after `applied` steps."""

    def save(self, applied: int, last: bool = False) -> None:
        """Start to copy and write this member's portion of the present state."""


Loop = Callable[[Any, Training], "WorkerFinished"]
"""A training loop: (the result of `Prepared.build`, the worker's services) -> the final report."""


@dataclass(frozen=True)
class ServerJob:
    """The job, as a parameter-server process has it."""

    job: Job
    schedule: Schedule
    steps: int
    prepared: Any
    """The result of the strategy's `prepare`, in host memory."""


class ServerHost(Protocol):
    """The worker's services for a parameter-server process."""

    @property
    def worker(self) -> int:
        """The number of this server."""

    @property
    def host(self) -> str: ...

    @property
    def address(self) -> str:
        """The coordinator's address."""

    @property
    def credential(self) -> Credential: ...

    @property
    def segments(self) -> SegmentClient | None:
        """The source of shared memory. None: workers are on other hosts and cannot map it."""

    @property
    def saves_every(self) -> int:
        """Steps between two checkpoints; 0: no checkpoints by step."""

    def load(self) -> ServerJob: ...

    def saved(self, life: int, sealed: int, lazily: bool = False) -> Saved | None:
        """The state with which this life of the servers begins; None: the job's initial values. `sealed`: the run's
        newest checkpoint. `lazily`: tensors are read on access."""


class Strategy(ABC):
    """How a job is learnt: a frozen value whose string form the parser reads again. It answers the questions of
    launcher, coordinator, worker and tools, which never check its type. The defaults here are those of a strategy like
    allreduce. The value's module imports no torch; `on_workers` and `on_servers` name the modules that do."""

    on_workers: ClassVar[str]
    """The workers' module, with a function `prepare(strategy, job, schedule, device)` that returns a `Prepared`."""
    keeps_freed_memory: ClassVar[bool] = False
    """Whether workers keep the memory freed by a step for the next step, in huge pages. False: it returns to the
    system, as strategies that divide the model expect."""
    instruments: ClassVar[tuple[Instrument, ...]] = ()
    """The strategy's functions that a profile times, in addition to what modules declare (`instrument.py`)."""
    pace_names: ClassVar[tuple[str, ...]] = ()
    """The names of the numbers of a member's pace (`Training.spent`), if members choose it themselves. They begin with
    1."""
    on_servers: ClassVar[str] = ""
    """The servers' module, if there are servers, with a function `serve(host)`."""

    plain_loop: ClassVar[str] = "batches"
    """The single-process loop that learns the same (verification/process.py): `batches` (one global batch after the
    other), `rounds` (rounds of local steps) or `search` (L-BFGS)."""

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether the weights have the same bits for any number of workers."""

    @property
    @abstractmethod
    def transport(self) -> str:
        """How members exchange data: shm (memory of one host), gloo, nccl, or auto."""

    @property
    def learning(self) -> str:
        """What the strategy learns, however it runs: a run can continue from another strategy's checkpoint if both
        answers are equal. Empty: one step of the job's own optimizer per global batch."""
        return ""

    @property
    def stride(self) -> int:
        """Steps that are committed together: states exist after every multiple of it, and after the last step."""
        return 1

    @property
    def work_unit(self) -> str:
        """The name, for people, of the unit of work that members divide among themselves."""
        return "shard"

    @property
    def in_steps(self) -> bool:
        """Whether the members compute each step together. False: each member takes whole batches, without waiting."""
        return True

    @property
    def balances(self) -> bool:
        """Whether shards can move between members between two steps. False: members take their work themselves."""
        return self.in_steps

    @property
    def servers(self) -> int:
        """The number of parameter servers."""
        return 0

    @property
    def wish(self) -> Wish | None:
        """How many ways the model and its data are divided among the members; None: every member has the whole
        model."""
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
    def rechecks(self) -> bool:
        """Whether a member can compute another member's shard again and compare the gradients, before the commit."""
        return False

    @property
    def not_rechecked(self) -> str:
        """For people: the part of a step that `--recheck all` does not compare; empty: none."""
        return ""

    @property
    def state_on_device(self) -> bool:
        """Whether the run's state is on the members' devices. False: the state is in host memory, and accelerators hold
        copies of the parameters."""
        return False

    @property
    def inexact_form(self) -> str:
        """The string form of this strategy without the promise of equal bits, for people whose model cannot keep it;
        empty: there is none."""
        return ""

    @property
    def no_replay(self) -> str:
        """Why one process cannot compute a single step again; empty: it can."""
        return ""

    def takeover_text(self, step: int, recomputed: int, units: int) -> str:
        """For people: what is computed again when a generation finishes the unfinished `step` of an earlier one.
        `recomputed`: how many of the step's `units` units of work. Empty: not worth a line."""
        return ""

    def pace_text(self, pace: Sequence[int]) -> str:
        """For people: what a member does that has chosen this pace."""
        return "works with " + ", ".join(f"{name}={n}" for name, n in zip(self.pace_names, pace, strict=True))

    def source_text(self, source: str) -> str:
        """For people: the source of the state that members went back to (`RolledBack.source`)."""
        return "a checkpoint" if source == "checkpoint" else source

    def schedule_of(self, job: Job, samples: int) -> Schedule:
        """The samples of each step, for a data set of `samples` samples."""
        return Schedule(samples, job.global_batch, job.resolved_shards, job.drop_last)

    def prepare(self, job: Job, schedule: Schedule, device: torch.device) -> Prepared:
        """Make and check the model, on a worker."""
        prepared: Prepared = importlib.import_module(self.on_workers).prepare(self, job, schedule, device)
        return prepared

    def serve(self, host: ServerHost) -> int:
        """Run one server process. Returns its exit status."""
        status: int = importlib.import_module(self.on_servers).serve(host)
        return status
