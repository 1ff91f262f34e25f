"""The messages between key-value clients and servers (docs/kv.md), and the `MessageSet` that they make up.

Slice 0 is the catalogue: it lists the keys, the places of their stretches, and the workers at a barrier. The other
slices hold values.
"""

from __future__ import annotations

from msgspec import Struct

from distbelief.strategies.ps.protocol.frames import MessageSet
from distbelief.strategies.ps.protocol.messages import Content, OrderedQuestion, Reply

CATALOGUE = 0
"""The number of the catalogue's slice."""

Number = float | bool | tuple[float, ...]


class OptimizerSpec(Struct, frozen=True):
    """An optimizer as data: its name in torch.optim, in lower case, and its numbers."""

    name: str
    numbers: dict[str, Number]


class Dense(Struct, frozen=True, tag=True):
    """A tensor, cut into stretches of its elements."""

    dtype: str
    shape: tuple[int, ...]


class Rows(Struct, frozen=True, tag=True):
    """A table. A row takes memory after its first push. Every slice has some of the rows."""

    rows: int
    width: int
    init: str
    scale: float
    seed: int
    optimizer: OptimizerSpec | None
    """None: pushes are added."""


Form = Dense | Rows


class Stretch(Struct, frozen=True):
    """The elements from `first` to `end` of a tensor, in slice `slice`."""

    slice: int
    first: int
    end: int


class Entry(Struct, frozen=True):
    """The catalogue's entry of a key."""

    form: Form
    stretches: list[Stretch]
    """The stretches of a tensor. (For a table the slice of a row follows from the number of the row.)"""
    owner: int
    """The client that gives the key its first value."""
    attempt: int
    """Rises when another client takes over giving the first value."""
    sealed: bool = False
    """Whether all slices have the first value: then clients can push to the key and pull it."""


# --- changes of the catalogue ----------------------------------------------------------------------------------------


class DeclareKey(Content, frozen=True):
    """A client asks to give a key its first value. The first client that asks may. Later a client may take over by
    naming the attempt that timed out (`instead_of`). If there is no room, the catalogue makes no entry."""

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
    """A worker waits at a barrier. The barrier ends when all workers do."""

    client: int
    rank: int
    workers: int

    @property
    def speaker(self) -> int:
        return self.client


class Withdraw(Content, frozen=True):
    """A worker waits at the barrier no longer."""

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
    """A push of a stretch. The bytes lie where those of `PlaceKey` do."""

    key: str
    round: int = -1
    """The round of a synchronous push: applied when all workers have pushed this and every earlier round."""
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
    """The optimizer for later pushes to tensors."""

    spec: OptimizerSpec | None


# --- questions, each answered when the slice has all changes of the client before `after` -----------------------------


class Consult(OrderedQuestion, frozen=True):
    """A question for entries of the catalogue."""

    keys: list[str]
    sealed: bool = False
    """Whether to answer only when every declared key of these is sealed."""
    rank: int = -1
    """If not -1: answer only when the worker of this rank waits at no barrier."""


class PullKey(OrderedQuestion, frozen=True):
    key: str
    round: int = 0
    """Answered when at least this number of synchronous rounds was applied."""
    inline: bool = True
    """Whether to send the values in a frame."""
    values: bool = True
    """False: the client asks for the number of applied rounds alone."""


class PullKeyRows(OrderedQuestion, frozen=True):
    key: str
    rows: bytes
    """int64"""
    round: int = 0


# --- replies ---------------------------------------------------------------------------------------------------------


class Consulted(Reply, frozen=True):
    entries: dict[str, Entry]
    """The entries of the requested keys that exist."""
    arrived: list[int]
    """The ranks that wait at a barrier; `workers`: of how many."""
    workers: int
    room: int
    """Bytes that are free for values."""


class KeyPulled(Reply, frozen=True):
    """The values of a stretch or of rows: in a frame, or in the shared segment that it names."""

    rounds: int
    there: bool = True
    """False: this slice has nothing of the key."""
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
