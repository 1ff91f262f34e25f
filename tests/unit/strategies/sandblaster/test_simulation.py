"""Whatever happens to servers, workers and the driver, sandblaster comes to the bits of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.ps.searchworld import DeviceGroup, Kit, SearchWorld

STEPS = 4


@pytest.fixture(scope="module")
def kit() -> Kit:
    return Kit(STEPS)


def disturb(world: SearchWorld, most_servers: int, turns: int) -> None:
    for _ in range(turns):
        what = world.chance.random()
        if what < 0.30:
            world.work()
        elif what < 0.93:
            world.deliver()
        elif what < 0.97:
            world.remind()
        elif what < 0.975:
            world.kill_server()
        elif what < 0.99 and len(world.nodes) < most_servers:
            world.join_server()
        elif what < 0.992:
            world.slow_down()
        elif what > 0.998:
            world.kill_worker()


@pytest.mark.parametrize("losing", [0.0, 0.05])
@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (2, 2), (3, 3)])
def test_the_bits_of_one_process_whatever_happens(kit: Kit, servers: int, workers: int, losing: float) -> None:
    for seed in range(3):
        world = SearchWorld(kit, seed, servers, workers, losing)
        disturb(world, servers, 1500)
        world.finish()
        assert all(world.steps_done)


def test_members_that_compute_on_a_device_come_to_the_same_bits(kit: Kit) -> None:
    for seed in range(3):
        world = SearchWorld(kit, seed, 2, 2, losing=0.05, group=DeviceGroup)
        disturb(world, 2, 1500)
        world.finish()
        assert all(world.steps_done)


def test_nothing_happens_and_nothing_is_computed_twice(kit: Kit) -> None:
    world = SearchWorld(kit, 0, 2, 1, losing=0.0)
    world.finish()
    assert world.steps_done == [1] * STEPS
    assert world.portions_computed % kit.schedule.shards == 0


def test_every_member_dies_in_its_turn(kit: Kit) -> None:
    """Again and again, in the middle of steps: what was computed of the evaluation under way is found again."""
    world = SearchWorld(kit, 5, 2, 2, losing=0.0)
    for _ in range(25):
        disturb_quietly(world, 100)
        world.kill_worker()
    world.finish()
    assert all(world.steps_done)


def disturb_quietly(world: SearchWorld, turns: int) -> None:
    for _ in range(turns):
        world.work()
        for _ in range(3):
            world.deliver()


class Bowl(nn.Module):
    """Its loss has one minimum, which is soon found."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (-self.weight.square()).expand(len(inputs), 4)


def test_a_search_that_has_ended_leaves_nothing_to_be_done() -> None:
    kit = Kit(50, Bowl)
    assert kit.losses[-1] == kit.losses[-30]
    world = SearchWorld(kit, 1, 2, 2, losing=0.0)
    world.finish()
    iterations = sum(world.steps_done) // 2
    assert iterations < 20
    assert world.told[0].startswith("L-BFGS over 42 samples in 11 portions, with 3 pairs of history")
    assert world.told[1].startswith(f"L-BFGS has ended after {iterations} iterations: ")
    assert world.told[1].endswith(f"; the {50 - iterations} steps that are left change nothing")
