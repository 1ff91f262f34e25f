"""Every push counts once, whatever dies, is lost or comes twice; and a client sees its own."""

from __future__ import annotations

import pytest
import torch

from tests.support.kvworld import SIZE, World, placed, pulled, pushed

SLICES = [1, 2, 9]
OWN = 9


@pytest.mark.parametrize("seed", range(10))
def test_every_push_counts_once_while_servers_die(seed: int) -> None:
    world = World(seed, servers=2 + seed % 3, clients=3, losing=0.0)
    placed(world, "all", SLICES)
    for who in range(3):
        placed(world, f"of {who}", [OWN])
    world.losing = 0.1
    pushes = [0, 0, 0]
    asked: list[tuple[int, int, int]] = []
    for turn in range(160):
        who = world.chance.randrange(3)
        client = world.clients[who]
        pushed(client, "all", SLICES)
        pushed(client, f"of {who}", [OWN])
        pushes[who] += 1
        if turn % 3 == 0:
            pulled(client, turn, f"of {who}", OWN)
            asked.append((turn, who, pushes[who]))
        if turn % 9 == 4:
            world.kill()
        world.remind()
        for _ in range(world.chance.randrange(120)):
            world.deliver()
    world.settle()
    assert world.fleet.kills > 3
    for ticket, who, own in asked:
        values = torch.frombuffer(world.clients[who].replies[ticket].payload, dtype=torch.float32)
        assert own <= float(values[0]) <= pushes[who], "a client does not see what it has pushed"
    known = world.fleet.map()
    assert known is not None
    for number in SLICES:
        for server in (known.primaries[number], known.backups[number]):
            held = world.stores[server, number]._keys["all"]  # type: ignore[union-attr]
            assert held.values.tolist() == [float(sum(pushes))] * SIZE  # type: ignore[union-attr]
