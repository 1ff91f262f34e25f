"""What the coordinator tells others, in the imperative."""

from __future__ import annotations

from msgspec import Struct

from distbelief.control.reports import Member, PastGeneration, ServerMap, WrittenPart


class StartGeneration(Struct, frozen=True, tag=True):
    epoch: int
    generation: int
    members: list[Member]
    """In the order of their ranks. A worker that is not among them is a spare and waits."""
    transport: str
    """shm · slots · gloo · nccl"""
    past: list[PastGeneration] = []
    """The newest first."""
    reported: int = 0
    """The coordinator knows of all steps before this one."""
    sealed: int = 0
    """The newest checkpoint."""
    degrees: list[int] = []
    """Of a mesh of members: pipeline, data, sharded, tensor. Empty: each has the whole model."""


class Refuse(Struct, frozen=True, tag=True):
    """This member may not take part; it prints the reason and exits."""

    epoch: int
    reason: str


class Retire(Struct, frozen=True, tag=True):
    """Let go of the present generation, say so (WorkerLeft), and wait."""

    epoch: int
    generation: int


class Introduce(Struct, frozen=True, tag=True):
    """The coordinator does not know this worker, or not all of it: it is to say again what it has said."""

    epoch: int
    reported: int
    """All steps before this one are known; of later ones, whoever leads is to tell again."""


class StartWorker(Struct, frozen=True, tag=True):
    """To the agents: start a worker with this number, unless that was done before."""

    epoch: int
    worker: int
    host: str = ""
    """Whose agent is to do it; empty: that of the launching process."""


class KillWorker(Struct, frozen=True, tag=True):
    """To the agents: end this worker's process by force, and tell of its exit."""

    epoch: int
    worker: int
    reason: str


class Serve(Struct, frozen=True, tag=True):
    """To parameter servers and workers: this is who has which slice from now on."""

    epoch: int
    map: ServerMap


class StartServer(Struct, frozen=True, tag=True):
    """To the agents: start a parameter server with this number, unless that was done before."""

    epoch: int
    server: int
    host: str = ""
    """As in StartWorker."""


class KillServer(Struct, frozen=True, tag=True):
    """To the agents: end this parameter server's process by force, and tell of its exit."""

    epoch: int
    server: int
    reason: str


class Admit(Struct, frozen=True, tag=True):
    """To somebody who would be a worker: be this one."""

    epoch: int
    worker: int


class Welcome(Struct, frozen=True, tag=True):
    """To the agent of another host: its room is taken. A second frame holds what to run (launch/parcel.py)."""

    epoch: int
    host: str
    """What it is called from now on: no other host of the run is."""


class SaveAt(Struct, frozen=True, tag=True):
    """Take a snapshot when so many steps are applied."""

    epoch: int
    step: int


class SealCheckpoint(Struct, frozen=True, tag=True):
    """All parts are there: write the manifest."""

    epoch: int
    step: int
    parts: list[WrittenPart]
    """By the rank of their writers."""


class Answer(Struct, frozen=True, tag=True):
    """To whoever asked for something from outside."""

    epoch: int
    ok: bool
    text: str
    step: int = -1
    """At which it will be done."""


class RunFacts(Struct, frozen=True, tag=True):
    """To whoever asked what the run is like (FactsAsked)."""

    epoch: int
    number: int
    """Of the question."""
    now: float
    """The coordinator's clock."""
    phase: str
    strategy: str
    step: int
    """Steps that are known to be applied."""
    members: dict[int, str]
    """Worker -> host, of those that are there."""
    software: dict[str, str]
    """Versions, where the coordinator is."""
    facts: dict[str, str] = {}
    """As in a member's Canary; empty: nobody is ready yet."""


class EndRun(Struct, frozen=True, tag=True):
    """The run is over for whoever gets it. `status`: completed · failed · stopped; left: only for this worker."""

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
    | Serve
    | StartServer
    | KillServer
)
