"""What key-value clients and servers say to each other (see docs/kv.md), beside the words of runs (serverwords.py).

Slice 0 is the catalogue: which keys there are, where their stretches are, who has come to a barrier. The others hold
values.
"""

from __future__ import annotations

from msgspec import Struct

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


class DeclareKey(Struct, frozen=True, tag=True):
    """A client would give a key its first value. Who may follows from the catalogue: the first that asks, or whoever
    names the attempt that it has waited for in vain. There is no entry if there is no room."""

    client: int
    key: str
    form: Form
    instead_of: int = -1


class SealKey(Struct, frozen=True, tag=True):
    """All slices have the first value of the key."""

    client: int
    key: str
    attempt: int


class Arrive(Struct, frozen=True, tag=True):
    """A worker has come to a barrier. When all have, it is over."""

    client: int
    rank: int
    workers: int


class Withdraw(Struct, frozen=True, tag=True):
    """It waits no more."""

    client: int
    rank: int


# --- changes of a slice of values ------------------------------------------------------------------------------------


class PlaceKey(Struct, frozen=True, tag=True):
    """The first value of a stretch, in a frame or at `offset` of a shared segment; tables have none."""

    key: str
    attempt: int
    form: Form
    first: int = 0
    end: int = 0
    segment: str = ""
    offset: int = 0


class AddToKey(Struct, frozen=True, tag=True):
    """A push of a stretch. The bytes are where those of PlaceKey are."""

    key: str
    round: int = -1
    """Of synchronous pushes: applied when all workers' pushes of this round, and all before it, are there."""
    rank: int = 0
    workers: int = 1
    segment: str = ""
    offset: int = 0


class AddToRows(Struct, frozen=True, tag=True):
    """A push of rows of a table: their numbers (int64), then a row of float32 for each, in a frame."""

    key: str
    count: int
    round: int = -1
    rank: int = 0
    workers: int = 1


class SetOptimizer(Struct, frozen=True, tag=True):
    """What pushes to tensors are applied with from now on."""

    spec: OptimizerSpec | None


KeyContent = DeclareKey | SealKey | Arrive | Withdraw | PlaceKey | AddToKey | AddToRows | SetOptimizer

# --- questions, each answered when the slice has all changes of the client before `after` -----------------------------


class Consult(Struct, frozen=True, tag=True):
    """What is in the catalogue?"""

    ticket: int
    slice: int
    client: int
    after: int
    keys: list[str]
    sealed: bool = False
    """Answered when those keys that are declared are sealed too."""
    rank: int = -1
    """Answered when the client does not wait at a barrier any more."""


class PullKey(Struct, frozen=True, tag=True):
    ticket: int
    slice: int
    client: int
    after: int
    key: str
    round: int = 0
    """Answered when so many synchronous rounds were applied."""
    inline: bool = True
    """The values are wanted in a frame."""
    values: bool = True
    """No: only how many rounds were applied."""


class PullKeyRows(Struct, frozen=True, tag=True):
    ticket: int
    slice: int
    client: int
    after: int
    key: str
    rows: bytes
    """int64"""
    round: int = 0


KeyQuestion = Consult | PullKey | PullKeyRows

# --- replies ---------------------------------------------------------------------------------------------------------


class Consulted(Struct, frozen=True, tag=True):
    ticket: int
    slice: int
    entries: dict[str, Entry]
    """Of the keys that were asked for and that there are."""
    arrived: list[int]
    """The ranks that wait at a barrier, and of how many."""
    workers: int
    room: int
    """Bytes that are left for values."""


class KeyPulled(Struct, frozen=True, tag=True):
    """The values of a stretch, or of rows, in a frame; or where they can be mapped."""

    ticket: int
    slice: int
    rounds: int
    there: bool = True
    """No: this slice has nothing of the key."""
    segment: str = ""
    inline: bool = True


KeyReply = Consulted | KeyPulled


def content_has_payload(content: object) -> bool:
    match content:
        case PlaceKey(form=Dense(), segment=""):
            return True
        case AddToKey(segment="") | AddToRows():
            return True
    return False


def reply_has_payload(reply: object) -> bool:
    return isinstance(reply, KeyPulled) and reply.there and reply.inline
