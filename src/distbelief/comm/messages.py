"""The control plane's words: what members tell the coordinator (events) and what it tells them (commands).

Every message is a typed, tagged msgspec struct; bytes that do not decode to one of them are dropped by the receiver.
Events are in the past tense, commands imperative. No tensor and no pickle ever travels here.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from distbelief.shards import Range

SECRET_BYTES = 32
STATUS_UNKNOWN = -1000
"""In place of an exit status: it is dead, and of what will be known later."""
RUN_ENDS = "the run ends"
"""Why a worker gives up what it does: the one reason for which nothing is worth finishing."""
EXIT_REPORTED = 3
"""A worker ends with this status when it has said why in a WorkerFailed, which may still be on its way."""


# --- parts -----------------------------------------------------------------------------------------------------------


class JobFacts(Struct, frozen=True):
    """What the coordinator needs to know of the job. Two members with different facts do not train the same thing."""

    name: str
    shards: int
    steps: int
    global_batch: int
    samples: int
    parameters: int
    strategy: str


class Canary(Struct, frozen=True):
    """What a member computed for shard 0 of step 0, and on what. Members that would give other bits differ here."""

    fingerprint: str
    facts: dict[str, str]
    """Thread count, torch version, instruction set, device type…: the reason, when a fingerprint differs."""


class Timing(Struct, frozen=True):
    """Seconds since the generation's start, and shards computed in them."""

    data_s: float = 0.0
    compute_s: float = 0.0
    comm_s: float = 0.0
    shards: int = 0
    waits: dict[int, float] = {}
    """Rank -> seconds that this member has waited for that one; a part of `comm_s`."""
    wire_bytes: int = 0
    """Gradients that all members have sent, as far as this one saw, where they are compressed."""
    plain_bytes: int = 0
    """The same uncompressed."""
    pace: list[int] = []
    """Where it adapts itself: n_push and n_fetch."""
    helped: int = 0
    """Shards that it has computed for members that were late."""


class StepReport(Struct, frozen=True):
    step: int
    loss: float
    samples: int
    fingerprint: str
    at: float
    """Wall clock of the member that reports it (seconds since 1970)."""
    generation: int = 0
    """In which it was committed, or in which a commit that nobody had reported was found."""


class BrokenShard(Struct, frozen=True):
    """A worker died while it computed this shard."""

    worker: int
    step: int
    shard: int


class Evaluation(Struct, frozen=True):
    """Belongs to a committed step: `step` steps had been applied when it was taken."""

    step: int
    metrics: dict[str, float]


class Member(Struct, frozen=True):
    worker: int
    host: str
    shards: Range
    """The contiguous range of shards it computes. Its rank is its place in the list of members."""
    pid: int = 0
    place: str = ""
    """Which part of a divided model it has, for people."""


class PastGeneration(Struct, frozen=True):
    """One whose unfinished step the next may have to take over, or whose state."""

    generation: int
    members: list[Member]
    degrees: list[int] = []
    """As in StartGeneration."""


class ServerMap(Struct, frozen=True):
    """Who has which slice of the parameters. -1: nobody."""

    version: int
    life: int
    """Goes up when slices were lost and all of them begin anew, from a checkpoint."""
    primaries: list[int]
    backups: list[int]
    recruits: list[int]
    """Servers that are being given a copy of the slice."""
    addresses: dict[int, str]
    sealed: int = 0
    """The newest checkpoint when this life began: all servers begin from the same, also if another is sealed now."""


class WrittenPart(Struct, frozen=True):
    """A member's part of a checkpoint, as it lies in the folder."""

    size_bytes: int
    sha256: str


# --- events: to the coordinator --------------------------------------------------------------------------------------


class EngineAttached(Struct, frozen=True, tag=True):
    """The engine that starts processes on a host is there. Repeated now and then: it tells all there is to know, so
    that a coordinator that has just come up, or has missed something, knows it too."""

    host: str
    running: dict[int, int] = {}
    """Worker -> process number."""
    exited: dict[int, int] = {}
    """Worker -> status, as in WorkerExited."""
    servers: dict[int, int] = {}
    """Parameter server -> process number."""
    servers_exited: dict[int, int] = {}


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
    | WorkerJoined
    | WorkerReady
    | Heartbeat
    | WorkerFinished
    | WorkerFailed
    | WorkerExited
    | StepTakenOver
    | RolledBack
    | PlanShown
    | PeerDied
    | CollectiveFailed
    | LeaveRequested
    | WorkerLeft
    | JoinRequested
    | ScaleRequested
    | ServersRequested
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


# --- commands: from the coordinator ----------------------------------------------------------------------------------


class StartGeneration(Struct, frozen=True, tag=True):
    epoch: int
    generation: int
    members: list[Member]
    """In the order of their ranks. A worker that is not among them is a spare and waits."""
    transport: str
    """shm · gloo"""
    past: list[PastGeneration] = []
    """The newest first."""
    reported: int = 0
    """The coordinator knows of all steps before this one."""
    sealed: int = 0
    """The newest checkpoint."""
    degrees: list[int] = []
    """Of a mesh of members: pipeline, data, sharded, tensor. Empty: each has the whole model."""


class Refuse(Struct, frozen=True, tag=True):
    """This member may not take part; it prints the reason and exits."""

    epoch: int
    reason: str


class Retire(Struct, frozen=True, tag=True):
    """Let go of the present generation, say so (WorkerLeft), and wait."""

    epoch: int
    generation: int


class Introduce(Struct, frozen=True, tag=True):
    """The coordinator does not know this worker, or not all of it: it is to say again what it has said."""

    epoch: int
    reported: int
    """All steps before this one are known; of later ones, whoever leads is to tell again."""


class StartWorker(Struct, frozen=True, tag=True):
    """To an engine: start a worker with this number, unless that was done before."""

    epoch: int
    worker: int


class KillWorker(Struct, frozen=True, tag=True):
    """To an engine: end this worker's process by force, and tell of its exit."""

    epoch: int
    worker: int
    reason: str


class Serve(Struct, frozen=True, tag=True):
    """To parameter servers and workers: this is who has which slice from now on."""

    epoch: int
    map: ServerMap


class StartServer(Struct, frozen=True, tag=True):
    """To an engine: start a parameter server with this number, unless that was done before."""

    epoch: int
    server: int


class KillServer(Struct, frozen=True, tag=True):
    """To an engine: end this parameter server's process by force, and tell of its exit."""

    epoch: int
    server: int
    reason: str


class Admit(Struct, frozen=True, tag=True):
    """To somebody who would be a worker: be this one."""

    epoch: int
    worker: int


class SaveAt(Struct, frozen=True, tag=True):
    """Take a snapshot when so many steps are applied."""

    epoch: int
    step: int


class SealCheckpoint(Struct, frozen=True, tag=True):
    """All parts are there: write the manifest."""

    epoch: int
    step: int
    parts: list[WrittenPart]
    """By the rank of their writers."""


class Answer(Struct, frozen=True, tag=True):
    """To whoever asked for something from outside."""

    epoch: int
    ok: bool
    text: str
    step: int = -1
    """At which it will be done."""


class EndRun(Struct, frozen=True, tag=True):
    """The run is over for whoever gets it. `status`: completed · failed · stopped; left: only for this worker."""

    epoch: int
    status: str
    reason: str = ""


Command = (
    StartGeneration
    | Refuse
    | Retire
    | Introduce
    | StartWorker
    | KillWorker
    | Admit
    | SaveAt
    | SealCheckpoint
    | Answer
    | EndRun
    | Serve
    | StartServer
    | KillServer
)


_encoder = msgspec.msgpack.Encoder()
_events = msgspec.msgpack.Decoder(Event)
_commands = msgspec.msgpack.Decoder(Command)


def encode(message: Event | Command) -> bytes:
    return _encoder.encode(message)


def decode_event(data: bytes) -> Event:
    """Raises msgspec.MsgspecError for anything that is not an event."""
    event: Event = _events.decode(data)
    return event


def decode_command(data: bytes) -> Command:
    command: Command = _commands.decode(data)
    return command
