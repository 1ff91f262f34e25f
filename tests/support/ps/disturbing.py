"""Random disturbances of a simulated world of servers and workers."""

from __future__ import annotations

from tests.support.ps.world import World

STEPS = 9  # more than an epoch: one batch leaves shards empty


def disturb(world: World, most_servers: int, turns: int) -> None:
    """Whatever may happen, often enough that it happens in the middle of everything."""
    for _ in range(turns):
        what = world.chance.random()
        if what < 0.30:
            world.work()
        elif what < 0.93:
            world.deliver()
        elif what < 0.96:
            world.remind()
        elif what < 0.972:
            world.kill_server()
        elif what < 0.99 and len(world.nodes) < most_servers:
            world.join_server()
        elif what < 0.992:
            world.slow_down()
        elif what < 0.994:
            world.leave_server()
        elif what > 0.996:
            world.kill_worker()


def disturb_nobody(world: World, turns: int) -> None:
    for _ in range(turns):
        world.work()
        world.deliver()
        world.deliver()
    world.remind()
