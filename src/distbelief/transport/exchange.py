"""The interface of the data plane: adds up the partial sums of one step over the members of a generation.

Partial sums live in *slots*: one slot has the whole flat layout of the model (gradients, then float buffers), cut into
fixed *tiles*. An exchange knows bytes, tiles and the order of addition, but no models or optimizers. All
implementations pass one contract suite: shared memory (one host), torch.distributed (any hosts), a single member, and
accelerators on top of any of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from distbelief.shards import Program, Range
from distbelief.transport.shm.segment import Memory, Segment

TRANSFER_BYTES = 64 << 20
"""States travel in pieces of this size. Sender and receiver must count the same pieces, so it is the same for all
members."""
ROW = 4  # float64 numbers that travel per shard and step; Geometry.row may be larger


@dataclass(frozen=True)
class Tile:
    """A fixed stretch of the flat layout: the unit of reduction and of the optimizer.

    Tiles depend on the model alone. So every member runs the same operation on the same numbers of a tile.
    """

    index: int
    dtype: torch.dtype
    offset_bytes: int
    numel: int

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


def tile_views(memory: Memory, tiles: Sequence[Tile], layout_at: int = 0) -> list[torch.Tensor]:
    """The tiles as views of `memory`, in which the layout begins at the byte `layout_at` (below 0: before the memory,
    which then holds the last tiles only)."""
    return [memory.tensor(tile.dtype, layout_at + tile.offset_bytes, tile.numel) for tile in tiles]


@dataclass(frozen=True)
class Source:
    """The place of one partial sum of the step."""

    rank: int
    slot: int
    back: int = 0
    """0: in this generation; 1: in the generation before, and so on."""


@dataclass(frozen=True)
class PublishedSum:
    """A partial sum of an unfinished step that a member published in an earlier generation, perhaps before it died."""

    node: Range
    source: Source


@dataclass(frozen=True)
class DiedComputing:
    """A member of an earlier generation that died in the middle of computing a shard."""

    back: int
    rank: int
    step: int
    shard: int


@dataclass(frozen=True)
class Contribution:
    """A member's contribution to a step, in addition to its partial sums."""

    rows: np.ndarray
    """(shards, Geometry.row): numbers per shard. Only the rows of `mine` count."""
    mine: Sequence[Range]
    """The shards for which the member contributes rows, also empty ones."""
    nodes: Sequence[tuple[Range, int]]
    """(subtree, slot): the partial sums that the member has published."""
    untouched: np.ndarray
    """Per entry of the layout: whether the member's shards left it untouched."""
    integers: bytes
    """The integer buffers after the member's shards."""


@dataclass(frozen=True)
class AllContributions:
    """The contributions of all members together."""

    rows: np.ndarray
    untouched: np.ndarray
    integers: bytes
    """The integer buffers of the member that published the first partial sum."""


@dataclass(frozen=True)
class StepPlan:
    """Which partial sums are added in this step, and in which order. Equal on all members."""

    step: int
    sources: Sequence[Source]
    program: Program
    one_by_one: bool = False
    """The caller requests each sum once and finishes with it before it requests the next one, so the exchange may reuse
    one buffer for all."""


@dataclass(frozen=True)
class CompressedParameter:
    """One float32 parameter in the layout."""

    mark: int
    """Its index among all entries of the layout."""
    first: int
    """Its first element, counted in float32 from the start of the layout."""
    shape: tuple[int, ...]

    @property
    def part(self) -> slice:
        return slice(self.first, self.first + math.prod(self.shape))


@dataclass(frozen=True)
class Compression:
    """The compression of a flat layout's gradients on a network, as an exchange needs to know it."""

    method: str
    """An option as `option.canonical` writes it."""
    tiles: frozenset[int]
    """Tiles of float32 parameters. All other tiles travel uncompressed."""
    places: tuple[CompressedParameter, ...]
    seed: int
    always: bool = False
    """Keep compression on even where it costs more time than it saves."""
    apart: bool = False
    """Each member encodes its partial sums parameter by parameter, and sends them to all members. So the sums do not
    depend on the number of members, as exact strategies require."""


@dataclass(frozen=True)
class Geometry:
    """The sizes on which all members of an exchange agree."""

    tiles: Sequence[Tile]
    slot_bytes: int
    slots: Sequence[int]
    """Each rank's number of slots."""
    shards: int
    marks: int
    """The number of entries of the layout; each has a bit that says whether any shard touched it."""
    integer_bytes: int = 0
    """The size of the model's integer buffers."""
    row: int = ROW
    """Numbers that travel per shard and step."""
    gradient_tiles: int = 0
    """The number of tiles with gradients, which come before the tiles with float buffers."""
    compression: Compression | None = None
    """The compression of gradients over a network; None: none."""


@dataclass(frozen=True)
class Backup:
    """A shard that a member other than its owner has computed."""

    tiles: list[torch.Tensor]
    row: np.ndarray
    touched: np.ndarray


class Backups(Protocol):
    """Backup copies of late shards, for members that can read each other's slots. `stamp`: the step's number plus 1."""

    def starting(self, units: int) -> None:
        """Announce that this member is about to start its next shard; `units` includes it."""

    def late(self, stamp: int) -> list[tuple[int, int]]:
        """(rank, number of begun shards) of the members that still compute this step."""

    def has_room(self, slot: int) -> bool:
        """Whether this member can use that slot now."""

    def claim(self, shard: int, stamp: int) -> bool:
        """Announce that this member computes a backup of the shard. False: another member has announced it."""

    def offer(self, shard: int, stamp: int, slot: int, row: np.ndarray, touched: np.ndarray) -> None:
        """Publish a complete backup of the shard, in that slot of this member."""

    def find(self, shard: int, stamp: int) -> Backup | None:
        """A complete backup of the step's shard, if there is one."""


class Group(Protocol):
    """The members of a generation, who can send each other bytes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    shares_state: bool
    """Whether all members share one copy of the parameters."""
    backups: Backups | None
    """Backup copies of late shards; None: this group has none."""

    @property
    def waiting(self) -> bool:
        """Whether this member waits for other members now."""

    def died_computing(self) -> list[DiedComputing]:
        """Members of earlier generations that died while they computed a shard."""

    def gather(self, payload: bytes) -> list[bytes]:
        """The bytes of every member, by rank. Slow: in the step path it is for rechecks only."""

    def close(self) -> None: ...


class DeathWatch(Protocol):
    """A group in which a member can see that another member's training thread died, before its agent can."""

    def neighbour(self, timeout_s: float) -> tuple[int, Literal["alive", "ended", "dead"]]:
        """Watch the next member for at most `timeout_s`. Returns its rank and whether it is alive. Callable from any
        thread, after all members have met once."""


class Exchange(Group, Protocol):
    """A group that adds up partial sums."""

    tiles: Sequence[int]
    """The tiles that this member updates: its own tiles in shared memory, else all tiles."""

    def slot(self, index: int) -> Memory:
        """Memory for a partial sum, on the computing device."""

    def state(self, size_bytes: int, name: str = "state") -> Segment:
        """Memory that outlives generations, for parameters and optimizer state or other data: one copy per host, or a
        member's own copy."""

    def published_sums(self, step: int) -> list[PublishedSum] | None:
        """Partial sums of this step from earlier generations; None: no member had begun the step. Call it after all
        members have met: then no member of an earlier generation writes any more."""

    def begin(self, plan: StepPlan) -> None: ...

    def working(self, shard: int) -> None:
        """Record that this member is about to compute the shard; -1: it has left the user's code."""

    def publish(self, tile: int) -> None:
        """This member's slots have the tile's final values; its reduction may start."""

    def share(self, contribution: Contribution, meanwhile: Callable[[], bool] = lambda: False) -> AllContributions:
        """Contribute to the step. Returns all members' contributions, after all partial sums are published.

        `meanwhile` is called while other members still compute, as long as it returns True (it found work).
        """

    def reduced(self, tile: int) -> torch.Tensor:
        """The sum of the step's partial sums for one of `tiles`, in private memory. Partial sums that other members can
        read stay unchanged."""

    def scaled(self, tile: int, factor: float) -> torch.Tensor:
        """The sum times the factor; later calls of `reduced` return the same."""

    def share_squares(self, mine: dict[int, float]) -> list[float]:
        """Share a number for each of this member's tiles; returns the numbers of all tiles."""

    def applied(self) -> None:
        """Record that this member has applied the step."""

    def settle(self) -> None:
        """Wait until every member has applied the step; the slots may then be overwritten."""

    def transfer(self, block: torch.Tensor, source: int, receivers: Sequence[int]) -> None:
        """Copy memory from one member to some others. Does nothing where the state is shared."""


def tree_add(
    program: Program, parts: Sequence[torch.Tensor], out: torch.Tensor, scratch: Sequence[torch.Tensor]
) -> None:
    """Add `parts` in the order of `program` into `out`, never writing to a part. Needs one scratch tensor per level."""
    if isinstance(program, int):
        out.copy_(parts[program])
    else:
        _add(program, parts, out, scratch)


def _add(
    pair: tuple[Program, Program], parts: Sequence[torch.Tensor], out: torch.Tensor, scratch: Sequence[torch.Tensor]
) -> torch.Tensor:
    first, second = pair
    left = parts[first] if isinstance(first, int) else _add(first, parts, out, scratch)
    if isinstance(second, int):
        return torch.add(left, parts[second], out=out)
    return torch.add(left, _add(second, parts, scratch[0][: out.numel()], scratch[1:]), out=out)


def depth(program: Program) -> int:
    """The number of scratch tensors that `tree_add` needs for this program.

    >>> depth(((0, 1), (2, (3, 4))))
    2
    """
    if isinstance(program, int):
        return 0
    left, right = program
    return max(depth(left), 0 if isinstance(right, int) else 1 + depth(right))
