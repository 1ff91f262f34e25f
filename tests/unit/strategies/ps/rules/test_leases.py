"""The ledger against a model of workers that compute, push to slices, and die in any order."""

from __future__ import annotations

import random

import msgspec
import pytest

from distbelief.errors import DistBeliefError, JobError
from distbelief.strategies.ps.rules.leases import Done, Lease, Ledger, Wait, complete, lease
from tests.support.ps.leases import SLICES, World

ACTIONS = {"ask": 9, "push": 5, "finish": 6, "late": 2, "die": 1}
"""What may happen next, and how often."""


def play(seed: int, bound: int | None, deaths: bool, old_parameters: bool) -> World:
    chance = random.Random(seed)
    world = World(Ledger(total=chance.randrange(1, 60), bound=bound))
    workers = list(range(chance.randrange(1, 7)))
    for _ in range(chance.randrange(10, 200)):
        (action,) = chance.choices(list(ACTIONS), list(ACTIONS.values()))
        if action == "ask":
            old = chance.randrange(world.ledger.completed + 1) if old_parameters and chance.random() < 0.3 else None
            answer = world.ask(chance.choice(workers), old)
            if isinstance(answer, Wait) and old is None:
                assert answer.todo != "fetch", "it would have fetched the newest"
        elif action == "push" and (world.valid or world.fenced) and not old_parameters:
            world.push(chance.choice(world.valid + world.fenced), chance.randrange(SLICES))
        elif action == "finish" and world.valid:
            world.finish(chance.choice(world.valid))
        elif deaths and action == "late" and world.fenced:
            world.finish(chance.choice(world.fenced))
        elif deaths and action == "die":
            world.die(workers.pop(chance.randrange(len(workers))))
            workers.append(max([*workers, 100]) + 1)
        world.check()
    for worker in workers:
        world.die(worker)
    world.drain(999)
    world.check()
    return world


@pytest.mark.parametrize("bound", [0, 1, 2, 4, None])
@pytest.mark.parametrize("deaths", [False, True])
@pytest.mark.parametrize("old_parameters", [False, True])
def test_random_schedules_complete_each_update_once_within_the_bound(
    bound: int | None, deaths: bool, old_parameters: bool
) -> None:
    worlds = [play(seed, bound, deaths, old_parameters) for seed in range(40)]
    measured = {stale for world in worlds for stale in world.stale}
    if bound is None:
        assert max(measured) > 4
    else:
        assert max(measured) == bound, "reached, so the rule is not stricter than it says"


def test_counting_only_how_far_the_oldest_is_behind_would_not_do() -> None:
    """Three leases at version 0 with s = 1: none is behind yet, but whichever completes last would be by 2."""
    world = World(Ledger(total=9, bound=1))
    assert isinstance(world.ask(1), Lease)
    assert isinstance(world.ask(2), Lease)
    answer = world.ask(3)
    assert isinstance(answer, Wait)
    assert answer.todo == "wait"


def waits(bound: int, takes: list[int]) -> int:
    """How often workers are told to wait whose batches take `takes` ticks each; they ask again at every tick."""
    world = World(Ledger(total=10_000, bound=bound))
    ready = dict.fromkeys(range(len(takes)), 0)
    waited = 0
    for tick in range(60):
        for worker in ready:
            if ready[worker] == tick:
                for held in [held for held in world.valid if held.worker == worker]:
                    world.finish(held)
                leased = isinstance(world.ask(worker), Lease)
                waited += not leased
                ready[worker] += takes[worker] if leased else 1
    return waited


def test_what_the_bound_means_for_workers_is_as_the_file_says() -> None:
    assert waits(6, [1, 1, 1, 1]) == 0
    assert waits(5, [1, 1, 1, 1]) > 0, "2 (N - 1), and no less"
    assert waits(15, [1, 1, 1, 4]) == 0
    assert waits(14, [1, 1, 1, 4]) > 0, "(f + 1) (N - 1), and no less"
    assert waits(0, [1]) == 0


def test_a_slow_worker_holds_the_others_back_until_its_death_is_told() -> None:
    world = World(Ledger(total=50, bound=2))
    slow = world.ask(1)
    assert isinstance(slow, Lease)
    while isinstance(world.ask(2), Lease):
        world.finish(world.valid[-1])
    assert len(world.order) == 2
    world.die(1)
    again = world.ask(2)
    assert isinstance(again, Lease)
    assert (again.update, again.version) == (slow.update, 2), "first what was taken back, from the newest parameters"
    assert again.token > slow.token
    assert complete(world.ledger, slow.update, slow.token) == (world.ledger, False)
    world.drain(2)


def test_a_worker_that_asks_more_often_does_more() -> None:
    world = World(Ledger(total=90))
    done = {1: 0, 2: 0}
    for turn in range(90):
        worker = 1 if turn % 3 else 2
        world.ask(worker)
        world.finish(world.valid[-1])
        done[worker] += 1
    assert done == {1: 60, 2: 30}


def test_waiting_says_what_helps() -> None:
    world = World(Ledger(total=9, bound=1))
    world.ask(1)
    world.ask(1)
    answer = world.ask(1)
    assert isinstance(answer, Wait)
    assert answer.todo == "push"
    world.finish(world.valid[0])
    world.finish(world.valid[0])
    answer = world.ask(1, version=0)
    assert answer == Wait("its parameters are 2 updates old: too old to start from", "fetch")
    assert isinstance(world.ask(1, version=1), Lease)
    assert isinstance(world.ask(2), Wait), "the first started from version 1: there is no room for another"


def test_the_state_stays_small_and_travels() -> None:
    world = World(Ledger(total=5_000, bound=7))
    chance = random.Random(1)
    for turn in range(12_000):
        world.ask(turn % 5)
        if world.valid and chance.random() < 0.7:
            held = chance.choice(world.valid)
            world.ledger, _ = complete(world.ledger, held.lease.update, held.lease.token)
            world.valid.remove(held)
            world.order.append(held.lease.update)
        if turn % 1_000 == 0:
            data = msgspec.msgpack.encode(world.ledger)
            assert len(data) < 1_200
            assert msgspec.msgpack.decode(data, type=Ledger) == world.ledger
            assert msgspec.json.decode(msgspec.json.encode(world.ledger), type=Ledger) == world.ledger
    assert world.ledger.completed > 4_000


def test_the_histogram_stays_small_too() -> None:
    ledger = Ledger(total=3_000)
    slow: list[Lease] = []
    for turn in range(3_000):
        ledger, given = lease(ledger, turn)
        assert isinstance(given, Lease)
        if turn < 200:
            slow.append(given)
        else:
            ledger, _ = complete(ledger, given.update, given.token)
    for given in slow:
        ledger, _ = complete(ledger, given.update, given.token)
    assert ledger.staleness == {0: 2_800, 2_048: 200}


def test_an_empty_stream_is_done() -> None:
    assert lease(Ledger(total=0), 1)[1] == Done()


def test_wrong_values_are_refused() -> None:
    with pytest.raises(JobError, match="bound"):
        Ledger(total=1, bound=-1)
    with pytest.raises(JobError, match="updates"):
        Ledger(total=-1)
    with pytest.raises(DistBeliefError, match="version 3"):
        lease(Ledger(total=9), 1, version=3)
    assert complete(Ledger(total=9), 4, 1) == (Ledger(total=9), False)
