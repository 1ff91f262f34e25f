"""The messages between clients and parameter servers: typed headers. frames.py packs them together with their bytes.

First come the base classes and the messages that every kind of server shares. A feature derives its own messages from
the base classes (the strategy `ps` here and in tables/messages.py, `sandblaster` and `kv` in their folders) and lists
them in a `MessageSet` (messageset.py), so that this module names no feature.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from msgspec import Struct

from distbelief.shards import Range

VALUES_AT = 4096
"""In the shared memory of a slice its values begin here at the latest."""


def values_at(first_byte: int) -> int:
    """Where they begin: as far into a page as in the layout, so that workers can map whole pages to their places. What
    is before them takes less than the alignment of the layout.

    >>> values_at(0), values_at(4096 * 3 + 256)
    (4096, 256)
    """
    return first_byte % VALUES_AT or VALUES_AT


# --- what every kind of server has in common -------------------------------------------------------------------------


class Header(Struct, frozen=True, tag=True):
    """A message without its bytes."""

    @property
    def has_payload(self) -> bool:
        """Whether a frame of bytes follows the message."""
        return False


class Content(Header, frozen=True):
    """A change of a slice: the content of a `Push`."""

    @property
    def speaker(self) -> int | None:
        """The client in whose name the change is made: no other client may push it. None: any client may."""
        return None


class Update(Content, frozen=True):
    """A change that is named by the number of an update (`RUN`), whichever client sends it."""

    update: int


RUN = 1 << 40
"""In place of a client in the name of an `Update`: updates belong to the run, not to the worker that computes them."""


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
    """What a slice returns to a client together with the acknowledgement of a change (`Acknowledged`)."""


AnyContent = TypeVar("AnyContent", bound=Content)
AnyPushResult = TypeVar("AnyPushResult", bound=PushResult)


class Push(Header, Generic[AnyContent], frozen=True):
    client: int
    sequence: int
    """With the client, the name of the change: it is applied once, however often it comes."""
    slice: int
    content: AnyContent
    life: int = 0
    """That of the slices, by the sender's map; 0: it has none yet. What was meant for slices that have begun anew since
    counts for nothing."""

    @property
    def has_payload(self) -> bool:
        return self.content.has_payload


class Acknowledged(Header, Generic[AnyPushResult], frozen=True):
    """The change counts, whoever dies."""

    slice: int
    sequence: int
    source: int = -1
    """`RUN`, if the sequence is that of an update."""
    given: AnyPushResult | None = None


class NotPrimary(Header, frozen=True):
    """This server is not the slice's primary, by a map of that version."""

    slice: int
    version: int


# --- changes of a slice ----------------------------------------------------------------------------------------------


class PartialSum(Content, frozen=True):
    """A partial sum of a step: that of the shards from `first` to `end`. The slice's stretch of it is in a frame, or
    lies at its place of the layout in a shared segment."""

    step: int
    first: int
    end: int
    rows: bytes
    """The numbers that these shards tell of themselves (see `transport/exchange.py`), as float64."""
    touched: bytes
    """A byte per entry of the layout."""
    integers: bytes = b""
    """The integer buffers after the first shard of the step, where that is in it."""
    segment: str = ""
    generation: int = -1
    """Whose partial sum it is, where that makes a difference; see `RestartStep`."""
    coded: bool = False
    """The frame is compressed (strategies/ps/protocol/pushcoding.py)."""

    @property
    def has_payload(self) -> bool:
        return not self.segment


class RestartStep(Content, frozen=True):
    """From that step on only partial sums of this generation count. What others have sent of it is forgotten."""

    step: int
    generation: int


class ApplyStep(Content, frozen=True):
    """Every slice has all partial sums of the step: it is to be applied, with its gradients multiplied by this."""

    step: int
    factor: float


class StepBegun(Content, frozen=True):
    """A member computes this step: it has all that it needs of the one before. Said where late shards get backup
    copies, so that nobody goes on by more than a step without it."""

    step: int
    generation: int
    rank: int


class Note(Content, frozen=True):
    """Bytes that belong to the state after so many steps."""

    step: int
    content: bytes


class Gradient(Update, frozen=True):
    """An update of a worker that waits for nobody: its gradients, and by how much it changes the buffers. The slice's
    stretch is where that of a Node is. It is named by its number (`RUN`), whoever computes it."""

    step: int
    """The first of its batches: for what changes with the steps, such as the learning rate."""
    touched: bytes
    integers: bytes = b""
    """By how much the integer buffers change, each as int64. For slice 0."""
    segment: str = ""
    dated: bool = False
    """The values that it was computed with come along: in the same frame behind it, or in this segment."""
    values: str = ""
    coded: bool = False
    """The frame is compressed (strategies/ps/protocol/pushcoding.py)."""

    @property
    def has_payload(self) -> bool:
        return not self.segment


# --- changes of the ledger -------------------------------------------------------------------------------------------


class RequestLease(Content, frozen=True):
    """A worker wants an update to compute. The answer has a `LeasedUpdate`, or says why there is none."""

    worker: int
    version: int = -1
    """How many updates are in the parameters that it has; -1: it fetches them after this."""
    known: int = 0
    """It has heard of all steps before this one."""
    batches: int = 0
    """So many it would like to push together; 0: as many as the run fixes."""

    @property
    def speaker(self) -> int:
        return self.worker


class CompleteUpdate(Content, frozen=True):
    """Every slice has the update."""

    update: int
    token: int
    worker: int
    losses: list[float]
    """Of its batches."""
    samples: list[int]
    at: float

    @property
    def speaker(self) -> int:
        return self.worker


class Members(Content, frozen=True):
    """Whoever is not among them is gone: what it had is leased again."""

    generation: int
    workers: list[int]


class SetGate(Content, frozen=True):
    """Lease no update beyond this step until `OpenGate` comes, so that the parameters are those after exactly this many
    steps. If updates beyond this step are leased already, the gate is where the last of them ends."""

    step: int


class OpenGate(Content, frozen=True):
    """What was to be done at that step has been done."""

    step: int


# --- what the ledger returns -----------------------------------------------------------------------------------------


class LeasedUpdate(Struct, frozen=True, tag=True):
    update: int
    token: int
    step: int
    """The first of its batches."""
    batches: int
    completed: int
    """Updates completed."""


class NoLease(Struct, frozen=True, tag=True):
    reason: str
    fetch: bool
    """Newer parameters would help; else only time does."""
    completed: int


class AtGate(Struct, frozen=True, tag=True):
    """The parameters are those after exactly so many steps, and nobody computes. `last`: of the run."""

    step: int
    last: bool
    completed: int


class Completion(Struct, frozen=True):
    """A batch that counts."""

    step: int
    """How many were complete before it."""
    loss: float
    samples: int
    worker: int
    staleness: int
    at: float


class LeaseResult(PushResult, frozen=True):
    """The answer to an `RequestLease`."""

    what: LeasedUpdate | NoLease | AtGate
    done: int
    """Steps."""
    news: list[Completion] = []
    staleness: dict[int, int] = {}
    """How many updates had which, so far."""


# --- questions -------------------------------------------------------------------------------------------------------


class PullValues(Question, frozen=True):
    """Answered when the slice has this version at least, or never will."""

    version: int
    inline: bool = False
    """The values are wanted in a frame."""


class MeasureStep(Question, frozen=True):
    """Answered when the step's gradients are all there: what do the squares of each tile add up to?"""

    step: int
    generation: int = 0
    members: int = 0
    """So many of this generation must have begun the step too; 0: nobody says so."""


class Inspect(Question, frozen=True):
    """What is there of the step that is under way, and of those before it?"""

    briefly: bool = False
    """Nothing of those before it."""


class ReadState(Question, frozen=True):
    """Values and optimizer state at this version, for a checkpoint."""

    version: int


# --- replies ---------------------------------------------------------------------------------------------------------


class PulledValues(Reply, frozen=True):
    version: int
    """Lower than what was asked for: the step before that cannot be applied, and `rows` say why."""
    rows: bytes = b""
    """Of the step that led to this version, or of the one that cannot be applied. From slice 0 only."""
    integers: bytes = b""
    segment: str = ""
    """Where the values are; empty: in a frame."""

    @property
    def has_payload(self) -> bool:
        return not self.segment and self.version >= 0


class StepMeasured(Reply, frozen=True):
    squares: list[float]


class StepRecord(Struct, frozen=True):
    """What a step gave, as it was kept with the parameters."""

    step: int
    rows: bytes
    at: float


class Inspected(Reply, frozen=True):
    version: int
    nodes: list[Range]
    """Partial sums of the step under way that are there."""
    past: list[StepRecord] = []
    """Of the last steps, from slice 0 only; so is the note, with the steps that were applied when it was kept."""
    note: tuple[int, bytes] = (-1, b"")
    integers: bytes = b""
    began: int = 0
    """The step from which the parameters have gone on since they began, or began anew. From the ledger only."""


class SliceState(Reply, frozen=True):
    """Values, then optimizer state, tile by tile, in a frame; none, if the version is another one."""

    version: int
    counts: list[int] = []
    """Of a part of the tables: how many rows of each it has."""

    @property
    def has_payload(self) -> bool:
        return self.version >= 0
