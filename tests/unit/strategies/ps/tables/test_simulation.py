"""Whatever happens to servers and workers, rows have the bits of one process, and each row gradient counts once."""

from __future__ import annotations

import pytest

from tests.support.ps.disturbing import disturb, disturb_nobody
from tests.support.ps.tableparts import Kit, counting
from tests.support.ps.tableworld import FreeTableWorld, TableWorld

STEPS = 7  # more than an epoch: one batch leaves shards empty


@pytest.fixture(scope="module")
def kit() -> Kit:
    return Kit()


@pytest.mark.parametrize("losing", [0.0, 0.05])
@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (2, 2), (3, 3), (2, 4)])
def test_the_bits_of_one_process_whatever_happens(kit: Kit, servers: int, workers: int, losing: float) -> None:
    for seed in range(2):
        world = TableWorld(kit, seed, servers, workers, STEPS, losing)
        disturb(world, servers, 900)
        world.finish()


def test_nothing_happens(kit: Kit) -> None:
    world = TableWorld(kit, 0, 2, 2, STEPS, losing=0.0)
    world.finish()
    assert world.generation == 1


def test_many_servers_are_killed_in_one_run(kit: Kit) -> None:
    """One after the other, each as soon as nothing would be lost with it."""
    world = TableWorld(kit, 3, 3, 2, STEPS, losing=0.0)
    kills = 0
    while kills < 10:
        disturb_nobody(world, 40)
        before = len(world.nodes)
        world.kill_server()
        if len(world.nodes) < before:
            kills += 1
            world.join_server()
    world.finish()
    assert world.generation == 1  # no worker was disturbed


@pytest.mark.parametrize("losing", [0.0, 0.05])
@pytest.mark.parametrize(("servers", "workers"), [(2, 2), (3, 4)])
def test_every_row_gradient_counts_once(servers: int, workers: int, losing: float) -> None:
    kit = counting()
    for seed in range(2):
        world = FreeTableWorld(kit, seed, servers, workers, 30, losing)
        disturb(world, servers, 450)
        world.kill_worker()
        disturb(world, servers, 450)
        world.finish()
