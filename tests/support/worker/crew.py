"""Members with savers and one trainer, for the tests of savers next to this file."""

from __future__ import annotations

from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

import pytest

from distbelief.checkpoint.manifest import RUN, Facts
from distbelief.control.messages import CheckpointSealed, Event, PartSaved
from distbelief.options import SavePlan
from distbelief.worker.origin import facts_at
from distbelief.worker.rules import writing
from distbelief.worker.rules.control import Seal
from distbelief.worker.saving import Saver
from tests.support.replicas.states import Trainer, job_with

WAIT_S = 60.0  # only reached when something is broken
SILENCE_S = 0.2

Told = TypeVar("Told", bound=Event)


class Crew:
    """Members of one generation, each with a saver, who all hold the state of one trainer."""

    def __init__(self, folder: Path, members: int = 1, **plan: object) -> None:
        self.folder = str(folder)
        self.members = members
        self.run_id = ""
        self.told: SimpleQueue[Event] = SimpleQueue()
        self.trainer = Trainer(job_with("AdamW"))
        self.savers = [Saver(SavePlan(self.folder, **plan), rank, self.told.put) for rank in range(members)]

    def take(self, step: int, *ranks: int, generation: int = 1, last: bool = False, **metrics: float) -> None:
        self.trainer.train(step)
        for rank in ranks or range(self.members):
            self.trainer.act_as(rank, self.members)
            facts = facts_at(Facts(job={RUN: self.run_id}), self.trainer.replica, step)
            facts.metrics.update(metrics)
            self.savers[rank].take(self.trainer.replica, step, generation, facts, last)

    def hear(self, kind: type[Told]) -> Told:
        event = self.told.get(timeout=WAIT_S)
        assert isinstance(event, kind), event
        return event

    def parts(self) -> tuple[PartSaved, ...]:
        """What all of them have written, by rank."""
        found = [self.hear(PartSaved) for _ in range(self.members)]
        return tuple(sorted(found, key=lambda one: one.worker))

    def seal(self, step: int, sealer: int = 0, *, parts: tuple[PartSaved, ...] | None = None) -> None:
        parts = self.parts() if parts is None else parts
        self.savers[sealer].seal(Seal(step, tuple(one.part for one in parts)))

    def save(self, step: int, **metrics: float) -> None:
        """All of it, from the snapshots to the seal."""
        self.take(step, **metrics)
        self.seal(step)
        assert self.hear(CheckpointSealed).step == step

    def silence(self) -> None:
        with pytest.raises(Empty):
            self.told.get(timeout=SILENCE_S)


def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses between two tries."""
    monkeypatch.setattr(writing, "RETRY_S", 0.01)
    monkeypatch.setattr(writing, "LONGEST_RETRY_S", 0.02)
