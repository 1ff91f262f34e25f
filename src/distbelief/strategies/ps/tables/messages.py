"""What is said about tables: words of `serverwords.py`, which speak of rows instead of slices of an array."""

from __future__ import annotations

from msgspec import Struct

# --- changes of a part -----------------------------------------------------------------------------------------------


class ShardRows(Struct, frozen=True, tag=True):
    """What some shards of a step say about rows of tables, for one part of them: see
    `strategies/ps/tables/rowgradients.py`."""

    step: int
    shards: list[int]
    counts: list[list[int]]
    """By table, by shard: how many rows."""
    told: bytes
    """The numbers that these shards tell of themselves, as in a Node."""


class RowGradient(Struct, frozen=True, tag=True):
    """Likewise of an update of a worker that waits for nobody. It is named as a Gradient is."""

    update: int
    step: int
    counts: list[int]
    """By table."""


# --- questions -------------------------------------------------------------------------------------------------------


class Pull(Struct, frozen=True, tag=True):
    """The values of rows of a table. Answered when the part has this version, or a later one; -1: at once."""

    ticket: int
    slice: int
    version: int
    table: int
    rows: bytes
    """As int64."""


class Numbers(Struct, frozen=True, tag=True):
    """Which rows of a table are there, at this version? Answered as a Pull: their numbers, as int64."""

    ticket: int
    slice: int
    version: int
    table: int


class Count(Struct, frozen=True, tag=True):
    """How many rows of each table are there, at this version?"""

    ticket: int
    slice: int
    version: int


# --- answers ---------------------------------------------------------------------------------------------------------


class Pulled(Struct, frozen=True, tag=True):
    """The values are in a frame; none, if the part has gone on to another version."""

    ticket: int
    slice: int
    version: int


class Counted(Struct, frozen=True, tag=True):
    ticket: int
    slice: int
    version: int
    counts: list[int]
