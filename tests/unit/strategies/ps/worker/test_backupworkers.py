"""Late members' shards are computed by others: every step is applied once, and the bits are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from distbelief.shards import Range
from distbelief.strategies.flatmodel.rules.stepwork import plan_step, plan_takeover
from distbelief.strategies.ps.protocol.messages import ApplyStep, Inspect, MeasureStep, StepBegun, StepMeasured
from distbelief.strategies.ps.rules.gathering import shards_on_all_slices
from distbelief.strategies.ps.server.stores import Change
from distbelief.strategies.ps.worker.synchronous import measure_step
from distbelief.transport.exchange import PublishedSum, Source
from tests.support.ps.disturbing import STEPS, disturb
from tests.support.ps.parts import SHARDS, Kit
from tests.support.ps.world import World


@pytest.fixture(scope="module")
def kit() -> Kit:
    return Kit()


class HelpingWorld(World):
    """Whoever wants to leaves its shards to others; and anybody may say that a step is complete."""

    def _work(self, worker: int, rank: int, ranges: list[Range]) -> Iterator[None]:
        client = self.clients[worker]
        client.restart()
        looked = yield from client.ask(Inspect)
        if rank == 0:
            self.found = (
                min(one.version for one in looked),
                shards_on_all_slices(looked, SHARDS),
            )
        while self.found is None:
            yield
        step, nodes = self.found
        occupied = self.kit.schedule.occupied
        takeover = None
        if step < self.steps:
            held = [PublishedSum(node, Source(0, 0)) for node in nodes]
            takeover = plan_takeover(SHARDS, occupied(step), held, len(ranges), rank)
        values = b""
        if takeover is None or takeover.recomputed:
            values = self._seen((yield from self._bring(client, step)), step)  # copies: see worker/backupworkers.py
        self.met += 1
        while self.met < len(ranges):
            yield
        while step < self.steps:
            client.push(0, StepBegun(step, self.generation, rank))
            work = takeover or plan_step(SHARDS, occupied(step), ranges, rank)
            if takeover or self.chance.random() < 0.5:
                for node, slot in work.partials.results.items():
                    self._push(client, values, step, node, slot)
                    yield
            takeover = None
            for slot in range(100, 100 + 4 * SHARDS):
                looked = yield from client.ask(partial(Inspect, briefly=True))
                assert all(not one.past for one in looked)
                if any(one.version > step for one in looked):
                    break
                there = {shard for first, end in shards_on_all_slices(looked, SHARDS) for shard in range(first, end)}
                missing = sorted(set(range(occupied(step))) - there)
                if not missing:
                    break
                shard = self.chance.choice(missing)
                self._push(client, values, step, (shard, shard + 1), slot)
                yield
            measured = yield from client.ask(partial(measure_step, step, self.generation, len(ranges)))
            factor = self.kit.factor([one.squares for one in measured])
            for number in range(len(self.kit.shapes)):
                client.push(number, ApplyStep(step, factor))
            step += 1
            values = self._seen((yield from self._bring(client, step)), step)  # this version, and not a later one


@pytest.mark.parametrize("losing", [0.0, 0.05])
@pytest.mark.parametrize(("servers", "workers"), [(1, 2), (2, 2), (3, 3)])
def test_the_bits_of_one_process_with_helpers(kit: Kit, servers: int, workers: int, losing: float) -> None:
    for seed in range(3):
        world = HelpingWorld(kit, seed, servers, workers, STEPS, losing)
        disturb(world, servers, 900)
        world.finish()


def test_nobody_goes_on_from_a_step_that_somebody_has_not_begun(kit: Kit) -> None:
    store = kit.store(0)
    question = MeasureStep(1, 0, 0, generation=2, members=2)
    store.apply(kit.change(0, kit.values([kit.store(n) for n in range(len(kit.shapes))]), 0, (0, SHARDS)))
    store.apply(Change(StepBegun(0, 2, 0)))
    store.apply(Change(StepBegun(0, 1, 1)))  # of an earlier generation
    store.apply(Change(StepBegun(1, 2, 1)))  # of another step
    assert store.reply(question, "", True, True) is None
    copy = kit.store(0)
    copy.load(store.state())
    for one in (store, copy):
        assert one.reply(question, "", True, True) is None
        one.apply(Change(StepBegun(0, 2, 1)))
        found = one.reply(question, "", True, True)
        assert found is not None
        assert isinstance(found.message, StepMeasured)
        one.apply(Change(StepBegun(0, 3, 0)))  # a newer generation: all of it must say so
        assert one.reply(MeasureStep(1, 0, 0, 3, 2), "", True, True) is None
