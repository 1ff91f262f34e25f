"""Commands: what the coordinator sends to workers, servers, agents and outside processes. Names are imperative."""

from __future__ import annotations

from msgspec import Struct

from distbelief.shards import Range


class Member(Struct, frozen=True):
    worker: int
    host: str
    shards: Range
    """The contiguous range of shards that the member computes. Its rank is its index in the list of members."""
    pid: int = 0
    place: str = ""
    """The part of a divided model that the member has, for people to read."""
    gpu: str = ""
    """The accelerator that holds the member's state, if any."""


class PastGeneration(Struct, frozen=True):
    """An earlier generation. A later one may have to take over its state and finish its step."""

    generation: int
    members: list[Member]
    degrees: list[int] = []
    """As in StartGeneration."""


class ServerMap(Struct, frozen=True):
    """Which server is primary and which is backup of each slice of the parameters. -1: no server."""

    version: int
    life: int
    """The number of times that all slices were loaded: rises when slices were lost and all restart from a
    checkpoint."""
    primaries: list[int]
    backups: list[int]
    recruits: list[int]
    """By slice: the server that is receiving a copy of it."""
    addresses: dict[int, str]
    sealed: int = 0
    """The newest checkpoint when this life began. All servers load this one, even if a newer one exists by now."""


class WrittenPart(Struct, frozen=True):
    """A member's part of a checkpoint, as written to the folder."""

    size_bytes: int
    sha256: str


# --- the commands ----------------------------------------------------------------------------------------------------


class StartGeneration(Struct, frozen=True, tag=True):
    epoch: int
    generation: int
    members: list[Member]
    """By rank. A worker that receives this command and is no member is a spare and waits."""
    transport: str
    """How the members exchange data, by the name of the transport."""
    past: list[PastGeneration] = []
    """Newest first."""
    reported: int = 0
    """The coordinator has the reports of all steps before this one."""
    sealed: int = 0
    """The step of the newest checkpoint."""
    degrees: list[int] = []
    """How many ways the model and its data are divided: pipeline, data, sharded, tensor. Empty: every member has the
    whole model."""


class Refuse(Struct, frozen=True, tag=True):
    """This worker may not take part; it prints the reason and exits."""

    epoch: int
    reason: str


class Retire(Struct, frozen=True, tag=True):
    """Leave the present generation, report it (WorkerLeft), and wait."""

    epoch: int
    generation: int


class Introduce(Struct, frozen=True, tag=True):
    """The coordinator does not know this worker, or lacks some of its reports: the worker repeats them."""

    epoch: int
    reported: int
    """All steps before this one are known; the member of rank 0 reports the later ones again."""


class StartWorker(Struct, frozen=True, tag=True):
    """To the agents: start a worker with this number, unless it was started before."""

    epoch: int
    worker: int
    host: str = ""
    """The host whose agent starts it; empty: the launching process starts it."""


class KillWorker(Struct, frozen=True, tag=True):
    """To the agents: kill this worker's process, and report its exit."""

    epoch: int
    worker: int
    reason: str


class Serve(Struct, frozen=True, tag=True):
    """To parameter servers and workers: from now on slices are held as in this map."""

    epoch: int
    map: ServerMap


class StartServer(Struct, frozen=True, tag=True):
    """To the agents: start a parameter server with this number, unless it was started before."""

    epoch: int
    server: int
    host: str = ""
    """As in StartWorker."""


class KillServer(Struct, frozen=True, tag=True):
    """To the agents: kill this parameter server's process, and report its exit."""

    epoch: int
    server: int
    reason: str


class Admit(Struct, frozen=True, tag=True):
    """To a manually started process (JoinRequested): take this worker number."""

    epoch: int
    worker: int


class Welcome(Struct, frozen=True, tag=True):
    """To the agent of another host: the run takes the host. A second frame holds what to run (launch/parcel.py)."""

    epoch: int
    host: str
    """The host's name from now on, unique in the run."""


class SaveAt(Struct, frozen=True, tag=True):
    """Take a snapshot when `step` steps are applied."""

    epoch: int
    step: int


class SealCheckpoint(Struct, frozen=True, tag=True):
    """All parts are written: seal the checkpoint, that is, write its manifest."""

    epoch: int
    step: int
    parts: list[WrittenPart]
    """By the writer's rank."""


class Answer(Struct, frozen=True, tag=True):
    """To an outside process that asked for something."""

    epoch: int
    ok: bool
    text: str
    step: int = -1
    """The step at which the request will be carried out."""


class RunFacts(Struct, frozen=True, tag=True):
    """To an outside process that asked about the run (FactsAsked)."""

    epoch: int
    number: int
    """The question's number."""
    now: float
    """The coordinator's clock."""
    phase: str
    strategy: str
    step: int
    """All steps before this one are known to be applied."""
    members: dict[int, str]
    """Worker -> host, for all live workers that are to stay."""
    software: dict[str, str]
    """Versions of the coordinator's software."""
    facts: dict[str, str] = {}
    """As in a member's Canary; empty while no worker is ready."""


class JoinAgain(Struct, frozen=True, tag=True):
    """To a process of another start with the same key: that run is over here. An agent joins the run that is here now;
    other processes end."""

    epoch: int


class EndRun(Struct, frozen=True, tag=True):
    """The run is over for the receiver. `status`: completed · failed · stopped; left: only the receiver leaves."""

    epoch: int
    status: str
    reason: str = ""


Command = (
    StartGeneration
    | Refuse
    | Retire
    | Introduce
    | StartWorker
    | KillWorker
    | Admit
    | Welcome
    | SaveAt
    | SealCheckpoint
    | Answer
    | RunFacts
    | EndRun
    | JoinAgain
    | Serve
    | StartServer
    | KillServer
)
