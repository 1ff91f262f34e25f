"""The control plane's words: what members tell the coordinator (events) and what it tells them (commands).

Every message is a typed, tagged msgspec struct; bytes that do not decode to one of them are dropped by the receiver.
Events are in the past tense, commands imperative. No tensor and no pickle ever travels here.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from distbelief.shards import Range

SECRET_BYTES = 32
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


class StepReport(Struct, frozen=True):
    step: int
    loss: float
    samples: int
    fingerprint: str
    at: float
    """Wall clock of the member that reports it (seconds since 1970)."""


class Evaluation(Struct, frozen=True):
    """Belongs to a committed step: `step` steps had been applied when it was taken."""

    step: int
    metrics: dict[str, float]


class Member(Struct, frozen=True):
    worker: int
    host: str
    shards: Range
    """The contiguous range of shards it computes. Its rank is its place in the list of members."""


# --- events: to the coordinator --------------------------------------------------------------------------------------


class EngineAttached(Struct, frozen=True, tag=True):
    """The engine that starts processes on a host is there, and will start `workers` workers."""

    host: str
    workers: int


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


class StopRequested(Struct, frozen=True, tag=True):
    reason: str


Event = (
    EngineAttached
    | WorkerJoined
    | WorkerReady
    | Heartbeat
    | WorkerFinished
    | WorkerFailed
    | WorkerExited
    | StopRequested
)


# --- commands: from the coordinator ----------------------------------------------------------------------------------


class StartGeneration(Struct, frozen=True, tag=True):
    epoch: int
    generation: int
    members: list[Member]
    """In the order of their ranks. A worker that is not among them is a spare and waits."""
    transport: str
    """shm · gloo"""


class Refuse(Struct, frozen=True, tag=True):
    """This member may not take part; it prints the reason and exits."""

    epoch: int
    reason: str


class EndRun(Struct, frozen=True, tag=True):
    """The run is over. `status`: completed · failed · stopped."""

    epoch: int
    status: str
    reason: str = ""


Command = StartGeneration | Refuse | EndRun


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
