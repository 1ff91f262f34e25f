"""What `sandblaster` says to its servers, beside the messages of every server (ps/protocol/messages.py).

Slices hold stretches of named vectors, and the *search* (one slice more) holds what must be decided once: where the
driver is, and who computes which portions of the evaluation under way. Everything that a driver says has a number:
`generation << COUNTS | count`. So what an earlier driver has said and comes late is known by its number, and dropped.
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
"""Bits for the commands of one driver."""


def first_number(generation: int) -> int:
    """Of what the driver of a generation says.

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
    """Let workers fetch this vector. `evaluation`: sums of gradients there are gathered from now on; what came before
    under the same name stays, for it is the same point. -1: nothing else is to be gathered."""

    point: str
    evaluation: int = -1


class Finish(Struct, frozen=True, tag=True):
    """All sums of the evaluation are there: the gradient is their sum, times this."""

    evaluation: int
    gradient: str
    factor: float


Command = Combine | Copy | Drop | Show | Finish


class Do(Content, frozen=True):
    """Commands of a driver. A slice performs them in the order of their numbers, whatever the order they come in."""

    number: int
    commands: list[Command]


# --- changes of the search -------------------------------------------------------------------------------------------


class Begin(Content, frozen=True):
    """A driver with so many members begins an evaluation; -1: only its work. What it finds there of the same evaluation
    is done already."""

    worker: int
    number: int
    members: int
    evaluation: int = -1

    @property
    def speaker(self) -> int:
        return self.worker


class Portions(Struct, frozen=True, tag=True):
    """To be computed: a node of the tree over all portions, at the point that is shown with that number."""

    evaluation: int
    number: int
    node: Range


class Computed(Struct, frozen=True):
    """Every slice has the sum of these portions."""

    evaluation: int
    node: Range
    losses: list[tuple[float, float]]
    """By portion: the loss as a sum, and what it is to be divided by."""


class Take(Content, frozen=True):
    """A member wants portions of the step. The answer has some, or says why there are none."""

    generation: int
    worker: int
    step: int
    now: float
    computed: Computed | None = None

    @property
    def speaker(self) -> int:
        return self.worker


class Keep(Content, frozen=True):
    """So many steps are done. The search goes on from here, whoever drives it."""

    worker: int
    number: int
    """Also that with which the point is shown."""
    steps: int
    state: bytes
    """As the driver understands it."""
    loss: float
    samples: int
    at: float

    @property
    def speaker(self) -> int:
        return self.worker


# --- answers ---------------------------------------------------------------------------------------------------------


class Heard(Struct, frozen=True, tag=True):
    """To a driver. `counts`: no later one has begun; else it must not say anything more, to slices neither."""

    counts: bool


class Idle(Struct, frozen=True, tag=True):
    """There is nothing to compute at the moment."""


class Total(Struct, frozen=True, tag=True):
    """The evaluation is complete."""

    evaluation: int
    loss: float
    weight: float


class StepsDone(Struct, frozen=True):
    """Steps from `first` to `end` gave this; more than one where the search has ended."""

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
    """Answered when the command with the number `after` is performed: sums over the slice."""

    after: int
    dots: list[tuple[str, str]] = field(default_factory=list)
    sums: list[str] = field(default_factory=list)
    """Of absolute values."""
    largest: list[str] = field(default_factory=list)
    """Absolute value."""


class ReadVectors(Question, frozen=True):
    """The slice's stretches of these vectors, one after the other, for a checkpoint."""

    after: int
    names: list[str]


class Produced(Reply, frozen=True):
    dots: list[tuple[Range, list[float]]] = field(default_factory=list)
    """By subtree of the tree over all blocks (strategies/sandblaster/vectors.py)."""
    sums: list[tuple[Range, list[float]]] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)


class SearchKnown(Reply, frozen=True):
    """What the search holds, in answer to a `Inspect`."""

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
