"""The messages between clients and parameter servers, and between servers. frames.py packs them with their payloads.

First come the base classes and the messages that every kind of server shares. A feature derives its own messages from
the base classes (the strategy `ps` here and in tables/messages.py, `sandblaster` and `kv` in their folders) and lists
them in a `MessageSet` (frames.py), so that this module names no feature.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from msgspec import Struct

from distbelief.shards import Range
from distbelief.strategies.ps.rules.applied import AppliedChanges

VALUES_AT = 4096
"""The values of a slice begin at this offset of its shared memory, or before it."""


def values_at(first_byte: int) -> int:
    """The offset of a slice's values in its shared memory. It is as far into a page as the slice is in the layout, so
    that workers can map whole pages to their places. The header before the values is smaller than the alignment of the
    layout.

    >>> values_at(0), values_at(4096 * 3 + 256)
    (4096, 256)
    """
    return first_byte % VALUES_AT or VALUES_AT


# --- what every kind of server has in common -------------------------------------------------------------------------


class Header(Struct, frozen=True, tag=True):
    """A message without its payload."""

    @property
    def has_payload(self) -> bool:
        """Whether a frame with a payload follows the message."""
        return False


class Content(Header, frozen=True):
    """A change of a slice: the content of a `Push`."""

    @property
    def speaker(self) -> int | None:
        """The client in whose name the change is made: no other client may push it. None: any client may."""
        return None


class Update(Content, frozen=True):
    """A change that is named by the number of an update (see `RUN`), whichever client sends it."""

    update: int


RUN = 1 << 40
"""Stands for the client in the name of an `Update`: updates belong to the run, not to the worker that computes them."""


class Question(Header, frozen=True):
    ticket: int
    """The reply repeats it."""
    slice: int


class OrderedQuestion(Question, frozen=True):
    """Answered when the slice has every change of the client with a sequence number below `after`."""

    client: int
    after: int


class Reply(Header, frozen=True):
    """The answer to a `Question`."""

    ticket: int
    slice: int


class PushResult(Struct, frozen=True):
    """A slice's result for a client, sent with the acknowledgement of a change (`Acknowledged`)."""


AnyContent = TypeVar("AnyContent", bound=Content)
AnyPushResult = TypeVar("AnyPushResult", bound=PushResult)


class Push(Header, Generic[AnyContent], frozen=True):
    client: int
    sequence: int
    """(client, sequence) is the name of the change. A change is applied once, however often it is sent."""
    slice: int
    content: AnyContent
    life: int = 0
    """The life of the slices by the sender's map; 0: it has no map yet. Servers drop a push of an earlier life: all
    slices have begun anew from a checkpoint since."""

    @property
    def has_payload(self) -> bool:
        return self.content.has_payload


class Acknowledged(Header, Generic[AnyPushResult], frozen=True):
    """The change is applied on primary and backup: no single death loses it."""

    slice: int
    sequence: int
    source: int = -1
    """`RUN` for an update; else the client."""
    given: AnyPushResult | None = None


class NotPrimary(Header, frozen=True):
    """This server is not the primary of the slice by its map, which has this version."""

    slice: int
    version: int


# --- changes of a slice ----------------------------------------------------------------------------------------------


class PartialSum(Content, frozen=True):
    """The partial sum of the shards `first` to `end` - 1 of a step. The slice's stretch of it is the payload, or lies
    at its offset of the layout in a shared segment."""

    step: int
    first: int
    end: int
    rows: bytes
    """Loss, weight and counts of these shards as float64: ROW numbers per shard (see `transport/exchange.py`)."""
    touched: bytes
    """One byte per entry of the layout: whether a shard gave the parameter a gradient."""
    integers: bytes = b""
    """The integer buffers after shard 0; empty if shard 0 is not in the sum."""
    segment: str = ""
    generation: int = -1
    """The sender's generation, if sums of different generations differ; see `RestartStep`."""
    coded: bool = False
    """The payload is compressed (pushcoding.py)."""

    @property
    def has_payload(self) -> bool:
        return not self.segment


class RestartStep(Content, frozen=True):
    """From this step on only partial sums of this generation count. The slice forgets those of other generations."""

    step: int
    generation: int


class ApplyStep(Content, frozen=True):
    """Every slice has all partial sums of the step: apply it, with its gradients multiplied by `factor`."""

    step: int
    factor: float


class StepBegun(Content, frozen=True):
    """The member has the values that the step begins with, and computes. Members send it only with backup workers, so
    that the others are never more than one step ahead of a late member."""

    step: int
    generation: int
    rank: int


class Note(Content, frozen=True):
    """Bytes to be kept with the state after `step` steps."""

    step: int
    content: bytes


class Gradient(Update, frozen=True):
    """An asynchronous update: its gradients, and the differences by which it changes the buffers. The slice's stretch
    is the payload, or lies in a shared segment, as in a `PartialSum`."""

    step: int
    """The first of its batches: the learning rate depends on it."""
    touched: bytes
    integers: bytes = b""
    """The differences of the integer buffers as int64. Only slice 0 gets them."""
    segment: str = ""
    dated: bool = False
    """The values that the gradients were computed with come along: behind them in the payload, or in the segment
    `values`."""
    values: str = ""
    coded: bool = False
    """The payload is compressed (pushcoding.py)."""

    @property
    def has_payload(self) -> bool:
        return not self.segment


# --- changes of the slice of leases ----------------------------------------------------------------------------------


class RequestLease(Content, frozen=True):
    """A worker wants an update to compute. The result has a `LeasedUpdate`, or says why there is none."""

    worker: int
    version: int = -1
    """The number of updates in the parameters that the worker has; -1: it pulls them after this."""
    known: int = 0
    """The worker knows the completions of all steps before this one."""
    batches: int = 0
    """The number of batches that the worker would like to push together; 0: as many as the run fixes."""

    @property
    def speaker(self) -> int:
        return self.worker


class CompleteUpdate(Content, frozen=True):
    """Every slice has applied the update."""

    update: int
    token: int
    worker: int
    losses: list[float]
    """By batch; so are the samples."""
    samples: list[int]
    at: float

    @property
    def speaker(self) -> int:
        return self.worker


class Members(Content, frozen=True):
    """A generation begins: updates of workers that are not its members are leased again."""

    generation: int
    workers: list[int]


class SetGate(Content, frozen=True):
    """Lease no update beyond this step until `OpenGate` comes, so that the parameters are those after exactly this many
    steps. If updates beyond this step are leased already, the gate is where the last of them ends."""

    step: int


class OpenGate(Content, frozen=True):
    """The work at the gate of this step is done: workers may continue."""

    step: int


# --- results of the slice of leases ----------------------------------------------------------------------------------


class LeasedUpdate(Struct, frozen=True, tag=True):
    update: int
    token: int
    step: int
    """The first of its batches."""
    batches: int
    completed: int
    """Updates completed in this life."""


class NoLease(Struct, frozen=True, tag=True):
    reason: str
    fetch: bool
    """True: pull newer parameters and ask again. False: wait."""
    completed: int


class AtGate(Struct, frozen=True, tag=True):
    """The parameters are those after exactly `step` steps, and no worker computes. `last`: the run is done."""

    step: int
    last: bool
    completed: int


class Completion(Struct, frozen=True):
    """A completed batch."""

    step: int
    """The number of batches that were complete before it."""
    loss: float
    samples: int
    worker: int
    staleness: int
    at: float


class LeaseResult(PushResult, frozen=True):
    """The result of a `RequestLease`."""

    what: LeasedUpdate | NoLease | AtGate
    done: int
    """Steps that are done."""
    news: list[Completion] = []
    staleness: dict[int, int] = {}
    """Staleness -> the number of updates that had it."""


# --- questions -------------------------------------------------------------------------------------------------------


class PullValues(Question, frozen=True):
    """The values of the slice. Answered when it has this version at least, or never will."""

    version: int
    inline: bool = False
    """The values are to be the payload, not a segment."""


class MeasureStep(Question, frozen=True):
    """The sum of squares of each tile's gradients. Answered when slice and backup have all sums of the step."""

    step: int
    generation: int = 0
    members: int = 0
    """This many members of the generation must have begun the step, too; 0: members do not send `StepBegun`."""


class Inspect(Question, frozen=True):
    """A question for the slice's partial sums of the step under way, and for its records of earlier steps."""

    briefly: bool = False
    """Leave out the earlier steps."""


class ReadState(Question, frozen=True):
    """Values and optimizer state of this version, for a checkpoint."""

    version: int


# --- replies ---------------------------------------------------------------------------------------------------------


class PulledValues(Reply, frozen=True):
    version: int
    """Lower than the version of the question: the step between them cannot be applied, and `rows` say why."""
    rows: bytes = b""
    """See `PartialSum`: of the step that led to this version, or of the step that cannot be applied. Slice 0 only."""
    integers: bytes = b""
    segment: str = ""
    """The shared memory that has the values; empty: they are the payload."""

    @property
    def has_payload(self) -> bool:
        return not self.segment and self.version >= 0


class StepMeasured(Reply, frozen=True):
    squares: list[float]


class StepRecord(Struct, frozen=True):
    """The results of a step, as slice 0 keeps them with the parameters."""

    step: int
    rows: bytes
    at: float


class Inspected(Reply, frozen=True):
    version: int
    nodes: list[Range]
    """The partial sums of the step under way that the slice has."""
    past: list[StepRecord] = []
    """The last steps. Slice 0 only, as the note, which comes with the number of steps applied when it was kept."""
    note: tuple[int, bytes] = (-1, b"")
    integers: bytes = b""
    began: int = 0
    """The step at which this life of the servers began. From the slice of leases only."""


class SliceState(Reply, frozen=True):
    """Payload: values, then optimizer state, tile by tile. Version -1: the slice has a later version already."""

    version: int
    counts: list[int] = []
    """For a part of the tables: the number of its rows by table."""

    @property
    def has_payload(self) -> bool:
        return self.version >= 0


# --- between servers: replication of a slice (rules/replication.py) --------------------------------------------------


class Snapshot(Struct, frozen=True):
    """The state of a slice without its large arrays."""

    version: int
    about: bytes
    """Encoded by the kind of slice that it is."""


class ForwardedChange(Header, Generic[AnyContent], frozen=True):
    """See `replication.Forward`."""

    server: int
    """The sender."""
    life: int
    slice: int
    term: int
    before: tuple[int, int]
    position: tuple[int, int]
    name: tuple[int, int] | None = None
    content: AnyContent | None = None

    @property
    def has_payload(self) -> bool:
        return self.content is not None and self.content.has_payload


class SliceCopySent(Header, frozen=True):
    """See `replication.SendCopy`. Payload: the arrays of the slice."""

    server: int
    life: int
    slice: int
    term: int
    position: tuple[int, int]
    applied: AppliedChanges
    about: Snapshot

    @property
    def has_payload(self) -> bool:
        return True


class ChangeAcknowledged(Header, frozen=True):
    """See `replication.Acknowledge`."""

    server: int
    life: int
    slice: int
    term: int
    position: tuple[int, int]
    version: int
    differs: bool = False
