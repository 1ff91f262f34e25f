"""Messages about tables: they name rows, where other messages (protocol/messages.py) mean a slice of an array."""

from __future__ import annotations

from distbelief.strategies.ps.protocol.messages import Content, Question, Reply, Update

# --- changes of a part -----------------------------------------------------------------------------------------------


class ShardRowGradients(Content, frozen=True):
    """What some shards of a step say about rows of tables, for one part of them: see
    `strategies/ps/tables/rowgradients.py`."""

    step: int
    shards: list[int]
    counts: list[list[int]]
    """By table, by shard: how many rows."""
    told: bytes
    """The numbers that these shards tell of themselves, as in a Node."""

    @property
    def has_payload(self) -> bool:
        return True


class UpdateRowGradients(Update, frozen=True):
    """Likewise of an update of a worker that waits for nobody. It is named as a Gradient is."""

    step: int
    counts: list[int]
    """By table."""

    @property
    def has_payload(self) -> bool:
        return True


# --- questions -------------------------------------------------------------------------------------------------------


class PullRows(Question, frozen=True):
    """The values of rows of a table. Answered when the part has this version, or a later one; -1: at once."""

    version: int
    table: int
    rows: bytes
    """As int64."""


class ListRows(Question, frozen=True):
    """Which rows of a table are there, at this version? Answered as a Pull: their numbers, as int64."""

    version: int
    table: int


class CountRows(Question, frozen=True):
    """How many rows of each table are there, at this version?"""

    version: int


# --- answers ---------------------------------------------------------------------------------------------------------


class PulledRows(Reply, frozen=True):
    """The values are in a frame; none, if the part has gone on to another version."""

    version: int

    @property
    def has_payload(self) -> bool:
        return self.version >= 0


class CountedRows(Reply, frozen=True):
    version: int
    counts: list[int]
