"""The messages between key-value clients and servers (see docs/kv.md), and the `MessageSet` that they make up.

Slice 0 is the catalogue: which keys there are, where their stretches are, who has come to a barrier. The others hold
values.
"""

from __future__ import annotations

from msgspec import Struct

from distbelief.strategies.ps.protocol.frames import MessageSet
from distbelief.strategies.ps.protocol.messages import Content, OrderedQuestion, Reply

CATALOGUE = 0
"""The number of its slice."""

Number = float | bool | tuple[float, ...]


class OptimizerSpec(Struct, frozen=True):
    """An optimizer as data: the name that torch.optim has for it, in lower case, and its numbers."""

    name: str
    numbers: dict[str, Number]


class Dense(Struct, frozen=True, tag=True):
    """A tensor, cut into stretches of its elements."""

    dtype: str
    shape: tuple[int, ...]


class Rows(Struct, frozen=True, tag=True):
    """A table whose rows take memory once they were pushed to. Every slice has rows of it."""

    rows: int
    width: int
    init: str
    scale: float
    seed: int
    optimizer: OptimizerSpec | None
    """None: what is pushed is added."""


Form = Dense | Rows


class Stretch(Struct, frozen=True):
    """The elements from `first` to `end` are in that slice."""

    slice: int
    first: int
    end: int


class Entry(Struct, frozen=True):
    form: Form
    stretches: list[Stretch]
    """Of a tensor. (Whose row is where follows from its number.)"""
    owner: int
    """The client that gives it its first value."""
    attempt: int
    """Goes up when another client takes that over."""
    sealed: bool = False
    """All slices have the first value: it can be pushed to and pulled."""


# --- changes of the catalogue ----------------------------------------------------------------------------------------


class DeclareKey(Content, frozen=True):
    """A client would give a key its first value. Who may follows from the catalogue: the first that asks, or whoever
    names the attempt that it has waited for in vain. There is no entry if there is no room."""

    client: int
    key: str
    form: Form
    instead_of: int = -1

    @property
    def speaker(self) -> int:
        return self.client


class SealKey(Content, frozen=True):
    """All slices have the first value of the key."""

    client: int
    key: str
    attempt: int

    @property
    def speaker(self) -> int:
        return self.client


class Arrive(Content, frozen=True):
    """A worker has come to a barrier. When all have, it is over."""

    client: int
    rank: int
    workers: int

    @property
    def speaker(self) -> int:
        return self.client


class Withdraw(Content, frozen=True):
    """It waits no more."""

    client: int
    rank: int

    @property
    def speaker(self) -> int:
        return self.client


# --- changes of a slice of values ------------------------------------------------------------------------------------


class PlaceKey(Content, frozen=True):
    """The first value of a stretch, in a frame or at `offset` of a shared segment; tables have none."""

    key: str
    attempt: int
    form: Form
    first: int = 0
    end: int = 0
    segment: str = ""
    offset: int = 0

    @property
    def has_payload(self) -> bool:
        return isinstance(self.form, Dense) and not self.segment


class AddToKey(Content, frozen=True):
    """A push of a stretch. The bytes are where those of PlaceKey are."""

    key: str
    round: int = -1
    """Of synchronous pushes: applied when all workers' pushes of this round, and all before it, are there."""
    rank: int = 0
    workers: int = 1
    segment: str = ""
    offset: int = 0

    @property
    def has_payload(self) -> bool:
        return not self.segment


class AddToRows(Content, frozen=True):
    """A push of rows of a table: their numbers (int64), then a row of float32 for each, in a frame."""

    key: str
    count: int
    round: int = -1
    rank: int = 0
    workers: int = 1

    @property
    def has_payload(self) -> bool:
        return True


class SetOptimizer(Content, frozen=True):
    """What pushes to tensors are applied with from now on."""

    spec: OptimizerSpec | None


# --- questions, each answered when the slice has all changes of the client before `after` -----------------------------


class Consult(OrderedQuestion, frozen=True):
    """What is in the catalogue?"""

    keys: list[str]
    sealed: bool = False
    """Answered when those keys that are declared are sealed too."""
    rank: int = -1
    """Answered when the client does not wait at a barrier any more."""


class PullKey(OrderedQuestion, frozen=True):
    key: str
    round: int = 0
    """Answered when so many synchronous rounds were applied."""
    inline: bool = True
    """The values are wanted in a frame."""
    values: bool = True
    """No: only how many rounds were applied."""


class PullKeyRows(OrderedQuestion, frozen=True):
    key: str
    rows: bytes
    """int64"""
    round: int = 0


# --- replies ---------------------------------------------------------------------------------------------------------


class Consulted(Reply, frozen=True):
    entries: dict[str, Entry]
    """Of the keys that were asked for and that there are."""
    arrived: list[int]
    """The ranks that wait at a barrier, and of how many."""
    workers: int
    room: int
    """Bytes that are left for values."""


class KeyPulled(Reply, frozen=True):
    """The values of a stretch, or of rows, in a frame; or where they can be mapped."""

    rounds: int
    there: bool = True
    """No: this slice has nothing of the key."""
    segment: str = ""
    inline: bool = True

    @property
    def has_payload(self) -> bool:
        return self.there and self.inline


MESSAGES = MessageSet(
    contents=(DeclareKey, SealKey, Arrive, Withdraw, PlaceKey, AddToKey, AddToRows, SetOptimizer),
    questions=(Consult, PullKey, PullKeyRows),
    replies=(Consulted, KeyPulled),
)
