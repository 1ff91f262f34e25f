"""Members of a mesh without a coordinator, and small jobs for them with everything that is awkward. Runs in processes
of the stage; the jobs and `MemberState`s without a mesh are for the test's own process too.

Members follow a script of generations that all of them know. What they return is everything that they hold at the end,
box by box, so that the test can put the whole together and see whether those who hold the same agree.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from distbelief.checkpoint.rules.boxes import Box, whole
from distbelief.data.sources import as_source
from distbelief.job import Job
from distbelief.shards import Schedule
from distbelief.strategies import parse
from distbelief.strategies.base import Seat
from distbelief.strategies.flatmodel.layout import trainable
from distbelief.strategies.flatmodel.namedtensors import tied
from distbelief.strategies.flatmodel.tileoptimizer import Recipe
from distbelief.strategies.mesh.run.modelpart import HeldParameter, ModelPart
from distbelief.strategies.mesh.run.prepared import PreparedMesh
from distbelief.strategies.mesh.run.replica import MeshReplica
from distbelief.strategies.mesh.run.runner import ShardBuffers, WholeModel
from distbelief.strategies.mesh.state.memberstate import MemberState, PartOptimizer
from distbelief.strategies.rules.degrees import Degrees, ranges
from distbelief.transport.abort import Abort, Aborted
from distbelief.transport.gloo.group import TorchGroup
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.shm.segment import SegmentClient
from distbelief.worker.feed import Feed
from distbelief.worker.jobfile import load_job

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "gpt.py"
TRANSFORMER = ROOT / "tests" / "e2e" / "jobs" / "transformer.py"
STEPS = 4

# --- jobs ------------------------------------------------------------------------------------------------------------


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def gpt() -> Job:
    """Tied weights and dropout. The third batch leaves half of the shards empty."""
    example = runpy.run_path(str(EXAMPLE))
    text = torch.randint(0, 256, (20, 9), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    return Job(
        model=lambda: example["GPT"](2, 16, 2, 8, 0.1),
        loss=example["loss"],
        optimizer=momentum,
        data=(text[:, :-1], text[:, 1:]),
        global_batch=8,
        shards=4,
        steps=STEPS,
        seed=5,
        schedule=lambda step: 1.0 / (1 + step),
    )


def cnn() -> Job:
    """Batch statistics; shards of 2 and 3 samples; the third batch leaves the last shard empty."""
    generator = torch.Generator().manual_seed(3)

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(6, 8, 3, stride=2),
            nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 16), nn.ReLU(), nn.Linear(16, 5),
        )  # fmt: skip

    return Job(
        model=model,
        loss=F.cross_entropy,
        optimizer=momentum,
        data=(torch.randn(27, 1, 8, 8, generator=generator), torch.randint(0, 5, (27,), generator=generator)),
        global_batch=10,
        shards=4,
        steps=STEPS,
        seed=6,
    )


class Counter(nn.Module):
    """Counts its calls in a whole number, and keeps a constant that is in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("constant", torch.linspace(0.5, 1.5, 12), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x * self.constant


class Awkward(nn.Module):
    """A frozen layer, a parameter that nothing uses, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.counter = Counter()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)))
        self.unused = nn.Linear(5, 7)
        self.last = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.counter(self.frozen(torch.tanh(self.first(x))))
        out: torch.Tensor = self.last(self.body(x))
        return out


class Loose(Awkward):
    """A tensor that is a plain attribute, neither parameter nor buffer; its random values move those made after it."""

    def __init__(self) -> None:
        self_loose = torch.randn(6)
        super().__init__()
        self.loose = self_loose

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.loose)


class Sometimes(Awkward):
    """A layer that is used by shards only that have a certain sample; in some steps that is none, or some."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if x[:, 0].max() > 50.0:
            out = out + self.sometimes(torch.tanh(self.first(x)))
        return out


def weighted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Some targets are to be ignored, so the weight is not the number of samples."""
    return F.cross_entropy(output, target, reduction="sum", ignore_index=-100), (target != -100).sum()


def awkward(model: Callable[[], nn.Module] = Awkward) -> Job:
    """In the second step nothing counts. Shards of 1 and 2 samples."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(30, 6, generator=generator)
    target = torch.randint(0, 4, (30,), generator=generator)
    target[7:14] = -100
    target[16] = target[3] = -100
    x[15, 0] = x[22, 0] = x[27, 0] = 100.0  # a shard of the third step, two of the fourth, and none before
    return Job(
        model=model,
        loss=weighted,
        optimizer=momentum,
        data=(x, target),
        global_batch=7,
        shards=4,
        steps=STEPS,
        seed=7,
        clip_norm=0.3,
        shuffle=False,
    )


def with_adam() -> Job:
    """Few rows: of three members one has nothing of the last layers. The optimizer keeps a number per parameter too."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2), nn.Tanh(),
            nn.Linear(2, 2),
        )  # fmt: skip

    generator = torch.Generator().manual_seed(8)
    return Job(
        model=model,
        loss=F.mse_loss,
        optimizer=adam,
        data=(torch.randn(66, 6, generator=generator), torch.randn(66, 2, generator=generator)),
        global_batch=12,
        shards=4,
        steps=12,
        seed=9,
    )


JOBS: dict[str, Callable[[], Job]] = {
    "gpt": gpt,
    "cnn": cnn,
    "awkward": awkward,
    "loose": lambda: awkward(Loose),
    "sometimes": lambda: awkward(Sometimes),
    "adam": with_adam,
    "bert": lambda: load_job(TRANSFORMER, {"kind": "bert"}),
}

# --- members ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generation:
    degrees: Degrees
    workers: tuple[int, ...]
    """In rank order."""
    until: int
    """Steps that are applied at its end."""
    called_away: tuple[int, ...] = ()
    """Workers that are called away inside of the vote on the step after that, when the others have come out of it."""


@dataclass(frozen=True)
class Held:
    """What a member had at the end of a generation."""

    losses: dict[int, float]
    """Of every step that it knows of."""
    began_at: int
    pieces: dict[str, tuple[Box, torch.Tensor]]
    rolled_back: tuple[int, int, str] | None
    plan: list[str]
    snapshots: list[int]
    """The steps of those that it keeps."""


@dataclass(frozen=True)
class Script:
    case: str
    strategy: str
    generations: tuple[Generation, ...]


def follow(segments: SegmentClient, worker: int, port: int, scripts: Sequence[Script]) -> list[list[Held | None]]:
    """One script after the other; what this worker held at the end of each generation, None where it was not in it."""
    found = []
    for number, script in enumerate(scripts):
        try:
            found.append(_train(worker, Rendezvous("127.0.0.1", port, str(number), timeout_s=60), script, 100 * number))
        except Exception as error:
            raise RuntimeError(f"worker {worker} in {script}") from error
    return found


def _train(worker: int, meeting: Rendezvous, script: Script, before: int) -> list[Held | None]:
    """Generation by generation with one and the same prepared model, as a worker does it in a run. No two generations
    of a process have the same number: torch would take their meshes for the same."""
    job = JOBS[script.case]()
    source = as_source(job.data)
    schedule = Schedule(len(source), job.global_batch, job.resolved_shards)
    prepared = parse(script.strategy).prepare(job, schedule, torch.device("cpu"))
    assert isinstance(prepared, PreparedMesh)
    feed = Feed(source, schedule, job, shuffle=job.shuffle)
    found: list[Held | None] = []
    for number, generation in enumerate(script.generations):
        if worker not in generation.workers:
            found.append(None)
            continue
        rank, size = generation.workers.index(worker), len(generation.workers)
        spans = ranges(generation.degrees, schedule.shards)
        feed.expect([(v, v + 1) for v in range(*spans[rank])], until=1000)
        abort = Abort()
        group = TorchGroup(replace(meeting, name=f"{meeting.name} {number}"), rank, size, abort)
        seat = Seat(rank, spans, 1000, before + number + 1, generation.degrees.as_list())
        replica = prepared.build(seat, group, feed.fetch)
        assert isinstance(replica, MeshReplica)
        began_at = replica.steps_applied()
        for step in range(began_at, generation.until):
            replica.compute(step)
            replica.commit(step)
        if worker in generation.called_away:
            _vote_in_vain(replica, abort, generation.until)
        elif generation.called_away:
            replica.compute(generation.until)
            replica.commit(generation.until)
        back = replica.rolled_back()
        found.append(
            Held(
                {one.step: one.loss for one in replica.remembered(0)},
                began_at,
                {name: (box, value.clone()) for name, (box, value) in replica._state.tensors().items()},
                (back.reached, back.step, back.source) if back else None,
                list(replica.plan_lines()),
                [one.step for one in prepared._snapshots.kept],
            )
        )
        if not generation.called_away:
            group.gather(b"")
        group.close()
    return found


def _vote_in_vain(replica: MeshReplica, abort: Abort, step: int) -> None:
    """Votes, and is called away before it learns what came of it, as when a neighbour died in that moment."""
    vote = replica._vote

    def interrupted() -> torch.Tensor:
        vote()
        abort.reason = "a member was lost"
        abort.check()
        raise AssertionError

    replica.compute(step)
    replica._vote = interrupted  # type: ignore[method-assign]
    try:
        replica.commit(step)
    except Aborted:
        return
    raise AssertionError("the vote was to be interrupted")


# --- a state without a mesh ------------------------------------------------------------------------------------------


def live_state(job: Job, model: nn.Module, boxes: Mapping[str, Box] | None = None) -> MemberState:
    """All of a model, or pieces of its parameters (which are then apart from the module's own)."""
    numbers = {name: number for number, (name, _) in enumerate(trainable(model))}
    first = tied(model)
    held, sources, others = [], [], {}
    for name, parameter in model.named_parameters():
        name, box = first.get(name, name), (boxes or {}).get(name, whole(parameter.shape))
        if name in numbers:
            memory = parameter.detach()[tuple(slice(*one) for one in box)]
            held.append(HeldParameter(name, numbers[name], tuple(parameter.shape), box, nn.Parameter(memory)))
            sources.append(parameter)
        else:
            others[f"model/{name}"] = (box, parameter.detach())
    for name, buffer in model.named_buffers():
        others[f"model/{name}"] = (whole(buffer.shape), buffer)
    part = ModelPart({0: WholeModel(model)}, held, others, sources, [], nullcontext)
    recipe = Recipe(job.optimizer, [parameter for _, parameter in trainable(model)])
    return MemberState(job, part, PartOptimizer(recipe, held), {0: ShardBuffers(model)})


def pieces_of(state: MemberState) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, (_, value) in state.tensors().items()}
