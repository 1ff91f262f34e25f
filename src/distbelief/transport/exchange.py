"""The interface of the data plane: how the partial sums of one step are added up over the members of a generation.

Partial sums live in *slots*: one slot is the whole flat layout of the model (gradients, then float buffers), cut into
fixed *tiles*. An exchange knows bytes, tiles and the order of addition; it knows nothing of models or optimizers.
All implementations pass one contract suite: shared memory (one host), torch.distributed (any hosts), one process
alone, and any of these under members that compute on accelerators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from distbelief.shards import Program, Range
from distbelief.transport.shm.segment import Memory, Segment

TRANSFER_BYTES = 64 << 20
"""States travel in pieces of this size. It is the same for all members: sender and receiver must count the same
pieces."""
ROW = 4  # float64 numbers that travel per shard and step, at least


@dataclass(frozen=True)
class Tile:
    """A fixed stretch of the flat layout: the unit of reduction and of the optimizer.

    Tiles depend on the model alone. So any member that works on one runs the same operation on the same numbers.
    """

    index: int
    dtype: torch.dtype
    offset_bytes: int
    numel: int

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Source:
    """Where one partial sum of the step lies."""

    rank: int
    slot: int
    back: int = 0
    """0: in this generation; 1: in the generation before; 2: in the generation before that…"""


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
    """What a member contributes to a step beside its partial sums."""

    rows: np.ndarray
    """(shards, Geometry.row): numbers per shard. Only the rows of `mine` count."""
    mine: Sequence[Range]
    """The shards that the member answers for, also empty ones."""
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
    """Those of the member that published the first partial sum."""


@dataclass(frozen=True)
class StepPlan:
    """What is added in this step, and in which order. The same on every member."""

    step: int
    sources: Sequence[Source]
    program: Program
    one_by_one: bool = False
    """Each sum is asked for once, and is not used any more when the next sum is asked for."""


@dataclass(frozen=True)
class CompressedParameter:
    """One float32 parameter in the layout."""

    mark: int
    """Its number among all entries of the layout."""
    first: int
    """Its first element, counted in float32 from the layout's beginning."""
    shape: tuple[int, ...]

    @property
    def part(self) -> slice:
        return slice(self.first, self.first + math.prod(self.shape))


@dataclass(frozen=True)
class Compression:
    """How the gradients of a flat layout are compressed on a network: all that an exchange must know of the model."""

    method: str
    """An option as `option.canonical` writes it."""
    tiles: frozenset[int]
    """Tiles of float32 parameters. All other tiles travel uncompressed."""
    places: tuple[CompressedParameter, ...]
    seed: int
    always: bool = False
    """Compression is not switched off where it costs more time than it saves."""
    apart: bool = False
    """Each partial sum is encoded by the member that made it, parameter by parameter, and goes to all members: the sums
    are then those of an exact strategy."""


@dataclass(frozen=True)
class Geometry:
    """The sizes that all members of an exchange agree on."""

    tiles: Sequence[Tile]
    slot_bytes: int
    slots: Sequence[int]
    """How many slots each rank has."""
    shards: int
    marks: int
    """Entries of the layout, each with a bit that says whether any shard touched it."""
    integer_bytes: int = 0
    """The size of the model's integer buffers."""
    row: int = ROW
    """Numbers that travel per shard and step."""
    gradient_tiles: int = 0
    """How many tiles hold gradients: these come first, then the float buffers."""
    compression: Compression | None = None
    """How gradients are made smaller on their way, over a network."""


@dataclass(frozen=True)
class Backup:
    """One shard, computed by another member than its owner."""

    tiles: list[torch.Tensor]
    row: np.ndarray
    touched: np.ndarray


class Backups(Protocol):
    """Backup copies of late shards, where members can read each other's slots. `stamp`: the step's number plus 1."""

    def starting(self, units: int) -> None:
        """This member is about to start another of its shards; `units` counts it."""

    def late(self, stamp: int) -> list[tuple[int, int]]:
        """(rank, shards that it has begun) of the members that still compute this step."""

    def has_room(self, slot: int) -> bool:
        """Whether this member can have that slot now."""

    def claim(self, shard: int, stamp: int) -> bool:
        """Announce that this member computes a backup of the shard; False: another member has announced it."""

    def offer(self, shard: int, stamp: int, slot: int, row: np.ndarray, touched: np.ndarray) -> None:
        """The backup of the shard is complete, in that slot of this member."""

    def find(self, shard: int, stamp: int) -> Backup | None:
        """A complete backup of this shard of the step, if there is one."""


class Group(Protocol):
    """The members of a generation, which can send each other bytes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    shares_state: bool
    """Whether the members keep one copy of the parameters between them."""
    backups: Backups | None
    """Where members can compute late shards for each other; None where they cannot."""

    @property
    def waiting(self) -> bool:
        """Whether this member waits for others at this moment."""

    def died_computing(self) -> list[DiedComputing]:
        """Members of earlier generations that died in the middle of a shard."""

    def gather(self, payload: bytes) -> list[bytes]:
        """The bytes of every member, by rank. Not for the step path."""

    def close(self) -> None: ...


class Exchange(Group, Protocol):
    """A group that adds up partial sums."""

    tiles: Sequence[int]
    """The tiles that this member brings up to date: its own ones in shared memory, all of them otherwise."""

    def slot(self, index: int) -> Memory:
        """Where this member computes: on its device."""

    def state(self, size_bytes: int, name: str = "state") -> Segment:
        """Memory for parameters and optimizer state, or other memory that lasts from one generation to the next: one
        copy per host, or this member's own."""

    def published_sums(self, step: int) -> list[PublishedSum] | None:
        """Partial sums of this step that earlier generations have left; None: no member had begun the step. Call it
        after all members have met: then no member of an earlier generation writes any more."""

    def begin(self, plan: StepPlan) -> None: ...

    def working(self, shard: int) -> None:
        """This member is about to compute that shard; -1: it has left the user's code."""

    def publish(self, tile: int) -> None:
        """This member's slots hold their final values of the tile. Its reduction may start."""

    def share(self, contribution: Contribution, meanwhile: Callable[[], bool] = lambda: False) -> AllContributions:
        """Contribute to the step, and get the contributions of all. After it, all partial sums of all members are
        there.

        `meanwhile` is called while others are still at work, for as long as it finds something to do (True).
        """

    def reduced(self, tile: int) -> torch.Tensor:
        """The sum of the step's partial sums for one of `tiles`, in private memory. Partial sums that other members can
        see stay intact."""

    def scaled(self, tile: int, factor: float) -> torch.Tensor:
        """The sum times the factor; from then on `reduced` gives this, too."""

    def share_squares(self, mine: dict[int, float]) -> list[float]:
        """Every member gives a number for each of its tiles; returns the numbers of all tiles."""

    def applied(self) -> None:
        """This member has applied the step."""

    def settle(self) -> None:
        """Return when every member has applied the step; the slots may then be written again."""

    def transfer(self, block: torch.Tensor, source: int, receivers: Sequence[int]) -> None:
        """Copy memory from one member to some others. Where the state is shared there is nothing to copy."""


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
    """How many scratch tensors `tree_add` needs for this program.

    >>> depth(((0, 1), (2, (3, 4))))
    2
    """
    if isinstance(program, int):
        return 0
    left, right = program
    return max(depth(left), 0 if isinstance(right, int) else 1 + depth(right))
