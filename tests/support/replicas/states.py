"""Models with everything that a checkpoint must hold, trained by one process; and their state saved as any number of
members would save it. For the tests of named states, and of savers (tests/unit/worker)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim

from distbelief.checkpoint.manifest import Facts
from distbelief.checkpoint.saving import seal, write_part
from distbelief.data.sources import as_source
from distbelief.job import Job
from distbelief.shards import Schedule
from distbelief.strategies.base import BeginFrom, Saved, Seat
from distbelief.strategies.dataparallel.prepared import PreparedAllReduce
from distbelief.strategies.dataparallel.replica import DataParallelReplica
from distbelief.transport.shm.segment import Segment
from distbelief.transport.singlemember import SingleMemberExchange
from distbelief.worker.feed import Feed
from distbelief.worker.origin import facts_at, saved_at

WIDTH = 1500  # so that parameters are cut into several tiles
STEPS = 6

_folders = itertools.count()


class Everything(nn.Module):
    """Several types, a frozen layer, tied weights, statistics, what is not in a state_dict, and parameters without
    elements or without any gradient."""

    def __init__(self, short: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.body = nn.Linear(6, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.2)
        self.short = nn.Parameter(torch.randn(4, WIDTH).to(short))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Linear(5, 3)
        self.square = nn.Linear(4, 4, bias=False)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.square.weight
        self.register_buffer("mask", torch.arange(6) % 2 == 0, persistent=False)
        self.register_buffer("passing", torch.tensor([0.5, -0.5]), persistent=False)
        self.register_buffer("nothing", torch.empty(0, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(torch.relu(self.norm(self.body(self.frozen(x) * self.mask))))
        h = h @ self.short.float().t() * self.scale.float()
        out: torch.Tensor = self.again(self.square(h)) + self.passing.mean() + self.empty.sum()
        return out


def without_short_types() -> Everything:
    """torch's fused SGD for CPUs does not update bfloat16 (pytorch issue 191763)."""
    return Everything(short=torch.float32)


def without_empty_gradients() -> Everything:
    """torch's Adafactor divides by the number of elements."""
    model = Everything()
    model.empty.requires_grad_(False)
    return model


class Lars(optim.Optimizer):
    """Not element-wise: it needs the norm of a whole parameter; and it counts its steps with a plain number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    state.setdefault("velocity", torch.zeros_like(parameter))
                    trust = parameter.norm() / (parameter.grad.norm() + 1e-3) / state["step"]
                    state["velocity"].mul_(0.9).add_(parameter.grad * trust)
                    parameter -= group["lr"] * state["velocity"]


Factory = Callable[[list[nn.Parameter]], optim.Optimizer]
OPTIMIZERS: dict[str, Factory] = {
    "SGD": lambda p: optim.SGD(p, lr=0.01),
    "momentum": lambda p: optim.SGD(p, lr=0.01, momentum=0.9),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "Lars": Lars,
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.01),
}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "SGD": without_short_types,
    "momentum": without_short_types,
    "Adafactor": without_empty_gradients,
}


def job_with(optimizer: str = "AdamW", model: Callable[[], nn.Module] | None = None, **options: Any) -> Job:
    generator = torch.Generator().manual_seed(5)
    data = torch.randn(40, 6, generator=generator), torch.randn(40, 4, generator=generator)
    facts: dict[str, Any] = {"global_batch": 8, "shards": 4, "steps": STEPS, "seed": 3, "clip_norm": 5.0, **options}
    made_by = model or MODELS.get(optimizer, Everything)
    return Job(model=made_by, loss=nn.functional.mse_loss, optimizer=OPTIMIZERS[optimizer], data=data, **facts)


class Trainer:
    """One process that has all shards, and begins where it is told to."""

    def __init__(self, job: Job, begin_from: BeginFrom = lambda: None) -> None:
        source = as_source(job.data)
        schedule = Schedule(len(source), job.global_batch, job.resolved_shards)
        feed = Feed(source, schedule, job, shuffle=True)
        prepared = PreparedAllReduce(job, schedule, torch.device("cpu"), exact=True)
        ranges = [(0, schedule.shards)]
        self.exchange = SingleMemberExchange(prepared.geometry(ranges))
        made = prepared.build(Seat(0, ranges, STEPS), self.exchange, feed.fetch, begin_from)
        assert isinstance(made, DataParallelReplica)
        self.replica = made
        self.model = prepared.model
        self.state = made._state
        self.layout = made._computer.layout

    def train(self, until: int) -> list[str]:
        """The fingerprints of the steps that it took."""
        found = []
        for step in range(self.replica.steps_applied(), until):
            self.replica.compute(step)
            found.append(self.replica.commit(step).fingerprint)
        self.replica.synchronise()
        return found

    def act_as(self, rank: int, members: int) -> None:
        """Save as that member of so many would."""
        self.exchange.rank, self.exchange.size = rank, members
        self.replica.__dict__.pop("_portions", None)

    def save(self, folder: str, members: int = 1) -> None:
        step = self.replica.steps_applied()
        records = []
        for rank in range(members):
            self.act_as(rank, members)
            portion = self.replica.portions()[rank]
            copy = Segment.private(portion.size_bytes)
            copying = self.replica.copy_portion(step, copy)
            copying.finish()
            outside = copying.outside
            records.append(write_part(folder, step, rank + 1, members, portion.slices(copy, outside)))
        seal(folder, step, facts_at(Facts(), self.replica, step), records)
        self.act_as(0, 1)

    def saved(self, members: int = 1) -> Saved:
        """Its present state, by way of the files of so many members."""
        folder = f"memory://saved/{next(_folders)}"
        self.save(folder, members)
        return saved_at(folder, self.replica.steps_applied())

    def everything(self) -> list[bytes]:
        """All bytes that make up its state."""
        tiles = [
            values.view(torch.uint8).numpy().tobytes() + optimizer.numpy().tobytes()
            for values, optimizer in zip(self.state.values, self.state.optimizer, strict=True)
        ]
        frozen = [p.detach().numpy().tobytes() for p in self.model.parameters() if not p.requires_grad]
        return [*tiles, *frozen, self.state.integers(self.state.steps_applied)]
