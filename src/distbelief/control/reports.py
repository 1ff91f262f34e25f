"""What messages of the control plane are made of: facts, reports, members, maps."""

from __future__ import annotations

from msgspec import Struct

from distbelief.shards import Range


class JobFacts(Struct, frozen=True):
    """What the coordinator needs to know of the job. Two members with different facts do not train the same thing."""

    name: str
    shards: int
    steps: int
    global_batch: int
    samples: int
    parameters: int
    strategy: str


class Canary(Struct, frozen=True):
    """What a member computed for shard 0 of step 0, and on what. Members that would give other bits differ here."""

    fingerprint: str
    facts: dict[str, str]
    """Thread count, torch version, instruction set, device type…: the reason, when a fingerprint differs."""


class Timing(Struct, frozen=True):
    """Seconds since the generation's start, and shards computed in them."""

    data_s: float = 0.0
    compute_s: float = 0.0
    comm_s: float = 0.0
    shards: int = 0
    waits: dict[int, float] = {}
    """Rank -> seconds that this member has waited for that one; a part of `comm_s`."""
    wire_bytes: int = 0
    """Gradients that all members have sent, as far as this one saw, where they are compressed."""
    plain_bytes: int = 0
    """The same uncompressed."""
    pace: list[int] = []
    """Where it adapts itself: n_push and n_fetch."""
    helped: int = 0
    """Shards that it has computed for members that were late."""


class StepReport(Struct, frozen=True):
    step: int
    loss: float
    samples: int
    fingerprint: str
    at: float
    """Wall clock of the member that reports it (seconds since 1970)."""
    generation: int = 0
    """In which it was committed, or in which a commit that nobody had reported was found."""


class BrokenShard(Struct, frozen=True):
    """A worker died while it computed this shard."""

    worker: int
    step: int
    shard: int


class Evaluation(Struct, frozen=True):
    """Belongs to a committed step: `step` steps had been applied when it was taken."""

    step: int
    metrics: dict[str, float]


class Member(Struct, frozen=True):
    worker: int
    host: str
    shards: Range
    """The contiguous range of shards it computes. Its rank is its place in the list of members."""
    pid: int = 0
    place: str = ""
    """Which part of a divided model it has, for people."""
    gpu: str = ""
    """The accelerator that its state is on, if any."""


class PastGeneration(Struct, frozen=True):
    """One whose unfinished step the next may have to take over, or whose state."""

    generation: int
    members: list[Member]
    degrees: list[int] = []
    """As in StartGeneration."""


class ServerMap(Struct, frozen=True):
    """Who has which slice of the parameters. -1: nobody."""

    version: int
    life: int
    """Goes up when slices were lost and all of them begin anew, from a checkpoint."""
    primaries: list[int]
    backups: list[int]
    recruits: list[int]
    """Servers that are being given a copy of the slice."""
    addresses: dict[int, str]
    sealed: int = 0
    """The newest checkpoint when this life began: all servers begin from the same, also if another is sealed now."""


class WrittenPart(Struct, frozen=True):
    """A member's part of a checkpoint, as it lies in the folder."""

    size_bytes: int
    sha256: str
