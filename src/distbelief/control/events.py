"""Events: what workers, servers, agents and outside processes send to the coordinator. Names are in the past tense."""

from __future__ import annotations

from msgspec import Struct

from distbelief.control.commands import WrittenPart


class JobFacts(Struct, frozen=True):
    """The coordinator's facts about the job. Members with different facts train different jobs."""

    name: str
    shards: int
    steps: int
    global_batch: int
    samples: int
    parameters: int
    strategy: str


class Canary(Struct, frozen=True):
    """A member's result for shard 0 of step 0, with the facts of its computation. A member with other bits has another
    result."""

    fingerprint: str
    facts: dict[str, str]
    """Thread count, torch version, instruction set, device type…: why fingerprints may differ."""


class Timing(Struct, frozen=True):
    """Seconds since the generation's start, and shards computed in them."""

    data_s: float = 0.0
    compute_s: float = 0.0
    comm_s: float = 0.0
    shards: int = 0
    waits: dict[int, float] = {}
    """Rank -> seconds that this member has waited for the member of that rank; a part of `comm_s`."""
    wire_bytes: int = 0
    """Compressed gradients that all members have sent, as far as this member saw."""
    plain_bytes: int = 0
    """The size of those gradients uncompressed."""
    pace: list[int] = []
    """The pace that the member has chosen, in the strategy's own numbers; empty: members choose none."""
    helped: int = 0
    """Shards that the member has computed for late members."""


class StepReport(Struct, frozen=True):
    step: int
    loss: float
    samples: int
    fingerprint: str
    at: float
    """The reporting member's wall clock (seconds since 1970)."""
    generation: int = 0
    """The generation that committed the step, or that found a commit which was not reported yet."""


class BrokenShard(Struct, frozen=True):
    """A worker died while it computed this shard."""

    worker: int
    step: int
    shard: int


class Evaluation(Struct, frozen=True):
    """Metrics of a committed state, after `step` steps."""

    step: int
    metrics: dict[str, float]


# --- the events ------------------------------------------------------------------------------------------------------


class EngineAttached(Struct, frozen=True, tag=True):
    """A host's agent is alive. The agent repeats this once a second with all it knows, so a coordinator that was
    restarted or has missed a message is up to date again."""

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
    """The most parameter servers that the host takes; -1: no limit."""


class HostOffered(Struct, frozen=True, tag=True):
    """A manually started agent of another host offers to host members. Repeated until it is welcomed."""

    host: str
    """The machine's name."""
    nonce: str
    """Random, one per agent: a repeated offer counts once."""
    room: int = 1
    grows: bool = False
    """Whether the run's target rises by the slots that no missing worker needs."""


class HostDeclined(Struct, frozen=True, tag=True):
    """A host that was to take part cannot: it lacks a plug-in, for example. The run does without it. Sent by the host's
    agent, or by a worker that a user starts by hand."""

    host: str
    """The name that the run knows."""
    reason: str
    nonce: str = ""
    """The nonce of the host's offer (HostOffered), if there was one."""


class HostLost(Struct, frozen=True, tag=True):
    """A host or its agent is gone. The process that started the agent reports this, earlier than a timeout would."""

    host: str
    reason: str


class WorkerJoined(Struct, frozen=True, tag=True):
    """A worker process is running. It has loaded the job, or failed to."""

    worker: int
    host: str
    pid: int


class WorkerReady(Struct, frozen=True, tag=True):
    """The worker has loaded the job and computed the canary."""

    worker: int
    job: JobFacts
    canary: Canary
    gpu: str = ""
    """The globally unique name of the accelerator that holds the worker's state; empty: the host's memory holds it."""
    notices: list[str] = []
    """What the user is told when the run starts, if this worker is the first to be ready."""


class Heartbeat(Struct, frozen=True, tag=True):
    worker: int
    epoch: int
    generation: int
    step: int
    """Steps applied so far, hence also the next step to run."""
    timing: Timing
    reports: list[StepReport] = []
    """Steps committed since the last heartbeat; only the member of rank 0 reports them."""
    evaluations: list[Evaluation] = []
    waiting: bool = False
    """The worker has done its part and waits for others."""
    finished: bool = False
    """The worker has sent WorkerFinished for this generation."""
    servers: int = 0
    """The version of the server map that the worker has."""


class WorkerFinished(Struct, frozen=True, tag=True):
    """All steps are applied and the last evaluation is done. Rank 0 fills in all fields; another member that has its
    own replica fills in the hash, which must equal rank 0's."""

    worker: int
    generation: int
    step: int
    weights_sha256: str = ""
    loss: float = 0.0
    metrics: dict[str, float] = {}
    samples_per_s: float = 0.0
    staleness: dict[int, int] = {}
    """Asynchronous runs: staleness -> number of updates that had it."""
    wire_bytes: int = 0
    plain_bytes: int = 0


class WorkerFailed(Struct, frozen=True, tag=True):
    """User code or its data failed, which is no death: the run ends with this traceback."""

    worker: int
    host: str
    kind: str
    """job · user · data · memory · loss · internal; set by the coordinator: exit · refused · timeout · coordinator"""
    message: str
    hint: str = ""
    traceback: str = ""
    step: int = -1
    shard: int = -1


class WorkerExited(Struct, frozen=True, tag=True):
    """An agent saw a worker's process end."""

    worker: int
    status: int
    """As in subprocess: an exit code, or minus the signal's number; or STATUS_NOT_STARTED."""
    reason: str = ""
    """Why it could not be started."""


class StepTakenOver(Struct, frozen=True, tag=True):
    """A generation found a step that an earlier generation had begun, and finishes it. Sent by its member of rank 0."""

    worker: int
    generation: int
    step: int
    recomputed: int
    """Shards that are computed again; the partial sums of all other shards exist."""
    broken: list[BrokenShard] = []
    """The shards that dead members were computing when they died, as far as known."""


class RolledBack(Struct, frozen=True, tag=True):
    """A part of the state after `reached` steps was lost on all members: the run goes on from an earlier state. Sent by
    the member of rank 0."""

    worker: int
    generation: int
    reached: int
    """Steps that had been applied."""
    step: int
    """Steps applied in the state from which the run goes on."""
    source: str
    """Where that state came from: `checkpoint`, or a word of the strategy."""


class PlanShown(Struct, frozen=True, tag=True):
    """How the model is divided among the members, for people to read. Sent by the member of rank 0."""

    worker: int
    generation: int
    lines: list[str]


class TracePart(Struct, frozen=True, tag=True):
    """A piece of a file for the run directory's `profile` folder, from a host that cannot write there."""

    worker: int
    name: str
    at: int
    """The piece's offset in the file, in bytes."""
    content: bytes


class PeerDied(Struct, frozen=True, tag=True):
    """A member saw, in shared memory, that another member's training thread died. That process may still be exiting."""

    worker: int
    generation: int
    dead: int


class CollectiveFailed(Struct, frozen=True, tag=True):
    """A connection between members broke in this member's collective call. The member waits for a command."""

    worker: int
    generation: int
    message: str


class LeaveRequested(Struct, frozen=True, tag=True):
    """A worker received SIGTERM. It goes on until the coordinator releases it."""

    worker: int


class WorkerLeft(Struct, frozen=True, tag=True):
    """The worker has left this generation: it computes and writes nothing in it any more."""

    worker: int
    generation: int


class JoinRequested(Struct, frozen=True, tag=True):
    """A manually started process asks to be one more worker."""

    pid: int


class ScaleRequested(Struct, frozen=True, tag=True):
    """A user wants this many workers from now on."""

    workers: int


class ServersRequested(Struct, frozen=True, tag=True):
    """A user wants this many parameter servers from now on."""

    servers: int


class FactsAsked(Struct, frozen=True, tag=True):
    """An outside process asks about the run, to compare a host with it. The run does not change."""

    number: int = 0
    """The answer (RunFacts) repeats it."""


class StopRequested(Struct, frozen=True, tag=True):
    reason: str
    at_once: bool = False
    """Stop without waiting for a checkpoint."""


class CheckpointRequested(Struct, frozen=True, tag=True):
    """A user wants a checkpoint now."""


class CheckpointLoaded(Struct, frozen=True, tag=True):
    """No member had the run's state: the run goes on from a checkpoint, or starts from step 0. Sent by rank 0."""

    worker: int
    step: int
    """0: no usable checkpoint exists."""
    folder: str
    skipped: list[tuple[int, str]] = []
    """Newer checkpoints that cannot be used, each with the reason."""


class PartSaved(Struct, frozen=True, tag=True):
    """A member has written its part of a checkpoint, durably."""

    worker: int
    generation: int
    """The generation of the snapshot: each of its members writes a part."""
    step: int
    """Steps applied."""
    part: WrittenPart
    pause_s: float
    """How long training paused for the snapshot."""
    write_s: float


class CheckpointSealed(Struct, frozen=True, tag=True):
    """The checkpoint's manifest is written: the checkpoint exists."""

    worker: int
    step: int
    size_bytes: int = 0
    parts: int = 0


class SaveFailed(Struct, frozen=True, tag=True):
    """A member could not write its part of a checkpoint, or could not write the manifest."""

    worker: int
    step: int
    message: str
    hint: str = ""
    gave_up: bool = False
    """The member will not try again."""


class SaveMissed(Struct, frozen=True, tag=True):
    """The member was asked to save at a step that it had already passed."""

    worker: int
    step: int


class ServerReady(Struct, frozen=True, tag=True):
    """A parameter server has loaded the job and can hold slices."""

    server: int
    host: str
    pid: int
    address: str
    """The address for workers and other servers."""
    slices: list[int]
    """The size in bytes of each slice of the job's parameters and optimizer state."""
    facts: dict[str, str]
    """As in a Canary."""


class ServerBeat(Struct, frozen=True, tag=True):
    """A parameter server is alive."""

    server: int
    epoch: int
    version: int
    """The version of the server map that the server has."""


class SliceCopied(Struct, frozen=True, tag=True):
    """The target has all of the slice, and gets every change that is acknowledged from now on. Sent by the primary."""

    server: int
    slice: int
    target: int
    known: int
    """The version of the server map that the primary had."""


class ServerFailed(Struct, frozen=True, tag=True):
    """A parameter server cannot go on, which is no death: the run ends with this traceback."""

    server: int
    host: str
    message: str
    hint: str = ""
    traceback: str = ""


class ServerExited(Struct, frozen=True, tag=True):
    """An agent saw a parameter server's process end."""

    server: int
    status: int
    reason: str = ""


Event = (
    EngineAttached
    | HostOffered
    | HostDeclined
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
