"""What the coordinator is told, in the past tense."""

from __future__ import annotations

from msgspec import Struct

from distbelief.control.reports import BrokenShard, Canary, Evaluation, JobFacts, StepReport, Timing, WrittenPart


class EngineAttached(Struct, frozen=True, tag=True):
    """The agent that starts processes on a host is there. Repeated now and then: it tells all there is to know, so
    that a coordinator that has just come up, or has missed something, knows it too."""

    host: str
    running: dict[int, int] = {}
    """Worker -> process number."""
    exited: dict[int, int] = {}
    """Worker -> status, as in WorkerExited."""
    servers: dict[int, int] = {}
    """Parameter server -> process number."""
    servers_exited: dict[int, int] = {}
    room: int = -1
    """The most workers that the host takes; -1: no limit."""
    server_room: int = -1
    """Likewise parameter servers."""


class HostOffered(Struct, frozen=True, tag=True):
    """Somebody has started an agent on another host: it would host members. Said again until it is welcomed."""

    host: str
    """What the machine is called."""
    nonce: str
    """Of this agent alone: its offer counts once."""
    room: int = 1
    grows: bool = False
    """Whether the run is to have more workers than before where it does not wait for these."""


class HostLost(Struct, frozen=True, tag=True):
    """Whoever has started the agent of a host sees that it is gone, or its machine: sooner than by its silence."""

    host: str
    reason: str


class WorkerJoined(Struct, frozen=True, tag=True):
    """A worker process has loaded the job, or failed to, and is there."""

    worker: int
    host: str
    pid: int


class WorkerReady(Struct, frozen=True, tag=True):
    """It has loaded the job and computed the canary."""

    worker: int
    job: JobFacts
    canary: Canary
    gpu: str = ""
    """Which accelerator its state is on, of all in the world; nothing where that is in the host's memory."""


class Heartbeat(Struct, frozen=True, tag=True):
    worker: int
    epoch: int
    generation: int
    step: int
    """Steps applied so far (so the next step to run)."""
    timing: Timing
    reports: list[StepReport] = []
    """Steps committed since the last heartbeat; only the member of rank 0 fills it."""
    evaluations: list[Evaluation] = []
    waiting: bool = False
    """It has done its part and waits for others."""
    finished: bool = False
    """It has said that it has finished this generation."""
    servers: int = 0
    """The version of the map of parameter servers that it knows."""


class WorkerFinished(Struct, frozen=True, tag=True):
    """All steps are applied and the last evaluation is done. Rank 0 fills in everything; a member with a replica of its
    own fills in the hash, which must be that of rank 0."""

    worker: int
    generation: int
    step: int
    weights_sha256: str = ""
    loss: float = 0.0
    metrics: dict[str, float] = {}
    samples_per_s: float = 0.0
    staleness: dict[int, int] = {}
    """Of an asynchronous run: how many updates had which."""
    wire_bytes: int = 0
    plain_bytes: int = 0


class WorkerFailed(Struct, frozen=True, tag=True):
    """User code or its data failed: not a death. It ends the run with this traceback."""

    worker: int
    host: str
    kind: str
    """job · user · data · memory · loss · internal; by the coordinator: exit · refused · timeout · coordinator"""
    message: str
    hint: str = ""
    traceback: str = ""
    step: int = -1
    shard: int = -1


class WorkerExited(Struct, frozen=True, tag=True):
    """The engine saw a worker's process end."""

    worker: int
    status: int
    """As in subprocess: an exit code, or minus the signal's number."""


class StepTakenOver(Struct, frozen=True, tag=True):
    """A generation found a step begun by an earlier one, and finishes it. From its member of rank 0."""

    worker: int
    generation: int
    step: int
    recomputed: int
    """Shards that are computed again; the partial sums of the others were there."""
    broken: list[BrokenShard] = []
    """What dead members were computing when they died, as far as it can be seen."""


class RolledBack(Struct, frozen=True, tag=True):
    """No member had a part of the state after `reached` steps any more: the run goes on from an earlier one. From the
    member of rank 0."""

    worker: int
    generation: int
    reached: int
    """Steps that had been applied."""
    step: int
    """Steps applied in the state from which it goes on."""
    source: str
    """snapshots (in the memory of neighbours) · checkpoint"""


class PlanShown(Struct, frozen=True, tag=True):
    """How the model is divided among the members of this generation, for people. From the member of rank 0."""

    worker: int
    generation: int
    lines: list[str]


class TracePart(Struct, frozen=True, tag=True):
    """A stretch of a file that belongs into the run directory's `profile` folder, from a host that does not see it."""

    worker: int
    name: str
    at: int
    """Where in the file it begins, bytes."""
    content: bytes


class PeerDied(Struct, frozen=True, tag=True):
    """A member saw the training thread of another die, in shared memory. Its process may still be coming to its end."""

    worker: int
    generation: int
    dead: int


class CollectiveFailed(Struct, frozen=True, tag=True):
    """A connection between members broke under this one. It waits for what the coordinator says."""

    worker: int
    generation: int
    message: str


class LeaveRequested(Struct, frozen=True, tag=True):
    """A worker was asked to go (SIGTERM): it goes on until it is let go."""

    worker: int


class WorkerLeft(Struct, frozen=True, tag=True):
    """It has let go of this generation: it computes and writes nothing in it any more."""

    worker: int
    generation: int


class JoinRequested(Struct, frozen=True, tag=True):
    """Somebody has started a process that would be one more worker."""

    pid: int


class ScaleRequested(Struct, frozen=True, tag=True):
    """Somebody wants this many workers from now on."""

    workers: int


class ServersRequested(Struct, frozen=True, tag=True):
    """Somebody wants this many parameter servers from now on."""

    servers: int


class FactsAsked(Struct, frozen=True, tag=True):
    """Somebody outside wants to know what the run is like, to compare a host with it. It changes nothing."""

    number: int = 0
    """The answer has it too."""


class StopRequested(Struct, frozen=True, tag=True):
    reason: str
    at_once: bool = False
    """Do not wait for a checkpoint."""


class CheckpointRequested(Struct, frozen=True, tag=True):
    """Somebody wants a checkpoint now."""


class CheckpointLoaded(Struct, frozen=True, tag=True):
    """No member had the run's state: it goes on from a checkpoint, or starts anew. From the member of rank 0."""

    worker: int
    step: int
    """0: there was none."""
    folder: str
    skipped: list[tuple[int, str]] = []
    """Newer checkpoints that cannot be used, and why."""


class PartSaved(Struct, frozen=True, tag=True):
    """A member has written its part of a checkpoint; it is durable."""

    worker: int
    generation: int
    """In which the snapshot was taken: all members of it have a part."""
    step: int
    """Steps applied."""
    part: WrittenPart
    pause_s: float
    """How long training stood still for the snapshot."""
    write_s: float


class CheckpointSealed(Struct, frozen=True, tag=True):
    """The checkpoint exists."""

    worker: int
    step: int
    size_bytes: int = 0
    parts: int = 0


class SaveFailed(Struct, frozen=True, tag=True):
    """A member could not write, or seal, a checkpoint."""

    worker: int
    step: int
    message: str
    hint: str = ""
    gave_up: bool = False
    """It will not be tried again."""


class SaveMissed(Struct, frozen=True, tag=True):
    """It was asked to save at a step that it had behind it."""

    worker: int
    step: int


class ServerReady(Struct, frozen=True, tag=True):
    """A parameter server has loaded the job and can be given slices."""

    server: int
    host: str
    pid: int
    address: str
    """Where workers and other servers reach it."""
    slices: list[int]
    """The size of every slice that the job's parameters and optimizer state are cut into, in bytes."""
    facts: dict[str, str]
    """As those of a Canary."""


class ServerBeat(Struct, frozen=True, tag=True):
    """A parameter server is alive."""

    server: int
    epoch: int
    version: int
    """Of the map that it knows."""


class SliceCopied(Struct, frozen=True, tag=True):
    """The recruit has all of the slice, and everything that is answered from now on. From the slice's primary."""

    server: int
    slice: int
    target: int
    known: int
    """The version of the map that it goes by."""


class ServerFailed(Struct, frozen=True, tag=True):
    """A parameter server cannot go on, and it is not a death: it ends the run with this traceback."""

    server: int
    host: str
    message: str
    hint: str = ""
    traceback: str = ""


class ServerExited(Struct, frozen=True, tag=True):
    """The engine saw a parameter server's process end."""

    server: int
    status: int


Event = (
    EngineAttached
    | HostOffered
    | HostLost
    | WorkerJoined
    | WorkerReady
    | Heartbeat
    | WorkerFinished
    | WorkerFailed
    | WorkerExited
    | StepTakenOver
    | RolledBack
    | PlanShown
    | TracePart
    | PeerDied
    | CollectiveFailed
    | LeaveRequested
    | WorkerLeft
    | JoinRequested
    | ScaleRequested
    | ServersRequested
    | FactsAsked
    | StopRequested
    | CheckpointRequested
    | CheckpointLoaded
    | PartSaved
    | CheckpointSealed
    | SaveFailed
    | SaveMissed
    | ServerReady
    | ServerBeat
    | SliceCopied
    | ServerFailed
    | ServerExited
)
