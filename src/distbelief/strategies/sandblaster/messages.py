"""The messages of `sandblaster`, beside the messages of every server (ps/protocol/messages.py).

Slices hold stretches of named vectors. One slice more, the search slice, holds what must be decided once: the state of
the search, and which member computes which portions. Every message of a driver has a number,
`generation << COUNTS | count`. By that number a slice recognises, and drops, late messages of an earlier driver.
"""

from __future__ import annotations

from msgspec import Struct, field

from distbelief.shards import Range
from distbelief.strategies.ps.protocol.frames import MessageSet
from distbelief.strategies.ps.protocol.messages import (
    Content,
    Inspect,
    Note,
    PartialSum,
    PulledValues,
    PullValues,
    PushResult,
    Question,
    Reply,
    SliceState,
)

COUNTS = 24
"""Bits of a number that count the commands of one driver."""


def first_number(generation: int) -> int:
    """The first number of the driver of a generation.

    >>> first_number(3) > first_number(2) + 1_000_000
    True
    """
    return generation << COUNTS


# --- changes of the vectors ------------------------------------------------------------------------------------------


class Combine(Struct, frozen=True, tag=True):
    """target = Σ coefficient · vector."""

    target: str
    terms: list[tuple[float, str]]


class Copy(Struct, frozen=True, tag=True):
    target: str
    source: str


class Drop(Struct, frozen=True, tag=True):
    names: list[str]


class Show(Struct, frozen=True, tag=True):
    """Let workers fetch this vector. `evaluation`: the slice gathers sums of gradients at this point from now on, and
    keeps the sums that it has under the same number, since the point is the same. -1: the slice gathers nothing new."""

    point: str
    evaluation: int = -1


class Finish(Struct, frozen=True, tag=True):
    """Every portion of the evaluation is computed: the gradient is the sum of all, times `factor`."""

    evaluation: int
    gradient: str
    factor: float


Command = Combine | Copy | Drop | Show | Finish


class Do(Content, frozen=True):
    """A batch of commands. A slice performs batches in the order of their numbers, not in the order of arrival."""

    number: int
    commands: list[Command]


# --- changes of the search -------------------------------------------------------------------------------------------


class Begin(Content, frozen=True):
    """A driver of `members` members begins an evaluation, or (-1) its work. Computed portions of the same evaluation
    stay."""

    worker: int
    number: int
    members: int
    evaluation: int = -1

    @property
    def speaker(self) -> int:
        return self.worker


class Portions(Struct, frozen=True, tag=True):
    """A node of the tree over all portions, to be computed at the point that command `number` shows."""

    evaluation: int
    number: int
    node: Range


class Computed(Struct, frozen=True):
    """Every slice has the sum of these portions."""

    evaluation: int
    node: Range
    losses: list[tuple[float, float]]
    """By portion: the loss as a sum, and its weight."""


class Take(Content, frozen=True):
    """A member asks for portions of the step. The answer has some, or the reason why not."""

    generation: int
    worker: int
    step: int
    now: float
    computed: Computed | None = None

    @property
    def speaker(self) -> int:
        return self.worker


class Keep(Content, frozen=True):
    """The driver has done `steps` steps: from now on every driver continues from this state."""

    worker: int
    number: int
    """The number of this message, and of the command that shows the point."""
    steps: int
    state: bytes
    """The encoded `State`; servers do not decode it."""
    loss: float
    samples: int
    at: float

    @property
    def speaker(self) -> int:
        return self.worker


# --- answers ---------------------------------------------------------------------------------------------------------


class Heard(Struct, frozen=True, tag=True):
    """To a driver. `counts`: no later driver has begun. If one has, this driver must not send anything more."""

    counts: bool


class Idle(Struct, frozen=True, tag=True):
    """No portion is free at the moment."""


class Total(Struct, frozen=True, tag=True):
    """The evaluation is complete."""

    evaluation: int
    loss: float
    weight: float


class StepsDone(Struct, frozen=True):
    """The result of the steps from `first` to `end`: more than one step if the search has ended."""

    first: int
    end: int
    loss: float
    samples: int
    at: float


class Stepped(Struct, frozen=True, tag=True):
    """The step is done."""

    number: int
    state: bytes
    done: StepsDone


class SearchGiven(PushResult, frozen=True):
    """The answer to a `Begin`, a `Take` or a `Keep`."""

    what: Heard | Portions | Idle | Total | Stepped
    done: int
    """Steps."""


# --- questions -------------------------------------------------------------------------------------------------------


class Products(Question, frozen=True):
    """A question for sums over the slice. Answered after command `after` is performed."""

    after: int
    dots: list[tuple[str, str]] = field(default_factory=list)
    sums: list[str] = field(default_factory=list)
    """Vectors whose absolute values are added up."""
    largest: list[str] = field(default_factory=list)
    """Vectors whose largest absolute value is wanted."""


class ReadVectors(Question, frozen=True):
    """A question for the slice's stretches of these vectors, one after the other. For a checkpoint."""

    after: int
    names: list[str]


class Produced(Reply, frozen=True):
    dots: list[tuple[Range, list[float]]] = field(default_factory=list)
    """By subtree of the tree over all blocks (vectors.py)."""
    sums: list[tuple[Range, list[float]]] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)


class SearchKnown(Reply, frozen=True):
    """The state of the search, in answer to an `Inspect`."""

    steps: int
    state: bytes
    """Empty: it has not begun."""
    note: tuple[int, bytes]
    past: list[StepsDone]


MESSAGES = MessageSet(
    contents=(PartialSum, Note, Do, Begin, Take, Keep),
    questions=(PullValues, Inspect, Products, ReadVectors),
    replies=(PulledValues, SliceState, Produced, SearchKnown),
    given=SearchGiven,
)
