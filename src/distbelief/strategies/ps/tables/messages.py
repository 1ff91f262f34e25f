"""Messages about sparse tables: they name rows. Those of dense parameters are in protocol/messages.py."""

from __future__ import annotations

from distbelief.strategies.ps.protocol.messages import Content, Question, Reply, Update

# --- changes of a part -----------------------------------------------------------------------------------------------


class ShardRowGradients(Content, frozen=True):
    """The gradients of rows that some shards of a step give, for one part of the tables. Payload: see
    payloads.py."""

    step: int
    shards: list[int]
    counts: list[list[int]]
    """By table, by shard: the number of rows."""
    told: bytes
    """`rows` of these shards, as in a `PartialSum`."""

    @property
    def has_payload(self) -> bool:
        return True


class UpdateRowGradients(Update, frozen=True):
    """The gradients of rows of an asynchronous update. It is named as a `Gradient` is."""

    step: int
    counts: list[int]
    """By table: the number of rows."""

    @property
    def has_payload(self) -> bool:
        return True


# --- questions -------------------------------------------------------------------------------------------------------


class PullRows(Question, frozen=True):
    """The values of rows of a table. Answered when the part has this version, or a later one; version -1: at once."""

    version: int
    table: int
    rows: bytes
    """As int64."""


class ListRows(Question, frozen=True):
    """The numbers of the rows that a table has at this version. Answered by a `PulledRows` with int64 numbers."""

    version: int
    table: int


class CountRows(Question, frozen=True):
    """The number of rows of each table at this version."""

    version: int


# --- answers ---------------------------------------------------------------------------------------------------------


class PulledRows(Reply, frozen=True):
    """Payload: the values. Version -1: the part has a later version already."""

    version: int

    @property
    def has_payload(self) -> bool:
        return self.version >= 0


class CountedRows(Reply, frozen=True):
    version: int
    counts: list[int]
