"""Whatever happens to servers and workers, every step is applied once, and the bits are those of one process."""

from __future__ import annotations

import pytest

from tests.support.ps.disturbing import STEPS, disturb, disturb_nobody
from tests.support.ps.parts import Kit
from tests.support.ps.world import MAPS, World


@pytest.fixture(scope="module")
def kit() -> Kit:
    return Kit()


@pytest.fixture(scope="module")
def kits(kit: Kit) -> dict[bool, Kit]:
    """By whether gradients are limited: if so, they are added up before the step is to be applied."""
    return {True: kit, False: Kit(clip_norm=None)}


@pytest.mark.parametrize(("losing", "limited"), [(0.0, True), (0.05, True), (0.05, False)])
@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (2, 2), (3, 3), (4, 2)])
def test_the_bits_of_one_process_whatever_happens(
    kits: dict[bool, Kit], servers: int, workers: int, losing: float, limited: bool
) -> None:
    for seed in range(3):
        world = World(kits[limited], seed, servers, workers, STEPS, losing)
        disturb(world, servers, 900)
        world.finish()


def test_nothing_happens(kit: Kit) -> None:
    world = World(kit, 0, 2, 2, STEPS, losing=0.0)
    world.finish()
    assert world.generation == 1


def test_a_recruit_that_is_behind_does_not_read_what_was_overwritten(kit: Kit) -> None:
    """It has the copy, and hears of the changes after it when the worker's memory holds sums of a later step."""
    world = World(kit, 0, 1, 1, STEPS, losing=0.0)
    world.join_server()
    old, new = ("server", 0), ("server", 1)
    for source, to in [(MAPS, old), (MAPS, new), (old, new), (new, old), (old, new)]:
        while world.links[source, to]:  # the map, the question what it has, that it has nothing, the copy
            world.hand_over(source, to)
    world.slow, world.patience = ("server", 1), 1.0
    for _ in range(40):
        if world.stores["0/0"].version < 3:
            world.work()
            for _ in range(60):
                world.deliver()
            world.remind()
    assert world.stores["0/0"].version == 3
    assert world.stores["1/0"].version == 0
    world.finish()


def test_twenty_servers_are_killed_in_one_run(kit: Kit) -> None:
    """One after the other, each as soon as nothing would be lost with it."""
    steps = 25
    world = World(kit, 3, 3, 2, steps, losing=0.0)
    kills = 0
    while kills < 20:
        disturb_nobody(world, 40)
        before = len(world.nodes)
        world.kill_server()
        if len(world.nodes) < before:
            kills += 1
            world.join_server()
    assert 0 < world.stores[f"{world.placed.map.primaries[0]}/0"].version < steps  # it was in the middle of it
    world.finish()
    assert world.generation == 1  # no worker was disturbed
