"""A worker's values are the servers' own memory, page by page, wherever slices begin and end."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from distbelief.shards import Schedule
from distbelief.strategies.flatmodel.compute import ShardComputer
from distbelief.strategies.flatmodel.layout import lay_out
from distbelief.strategies.flatmodel.tileoptimizer import Recipe
from distbelief.strategies.ps.protocol.messages import VALUES_AT, PulledValues, values_at
from distbelief.strategies.ps.rules.slicing import SliceShape, cut
from distbelief.strategies.ps.worker.exchange import ServerExchange
from distbelief.strategies.ps.worker.member import MappedValues, ParameterServerMember, whole_pages
from distbelief.transport.abort import Abort
from distbelief.transport.shm.memfd import allocate
from distbelief.transport.shm.segment import Segment

MODELS = {
    "smaller than a page": lambda: nn.Linear(6, 16),
    "slices within pages": lambda: nn.Sequential(nn.Linear(60, 200), nn.BatchNorm1d(200), nn.Linear(200, 4)),
    "two types": lambda: nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 300).double()),
}


def made(size_bytes: int) -> Segment:
    return Segment(allocate(size_bytes, "slice"), size_bytes)


class Servers:
    """Their memory, by the name of a slice's segment."""

    def __init__(self, shapes: list[SliceShape]) -> None:
        self.memory = {
            f"{server}/{shape.number}": made(VALUES_AT + shape.value_bytes) for server in range(2) for shape in shapes
        }

    def write(self, server: int, shape: SliceShape, values: torch.Tensor) -> None:
        stretch = self.memory[f"{server}/{shape.number}"].view(values_at(shape.first_byte), shape.value_bytes)
        stretch[:] = values[shape.first_byte : shape.end_byte].numpy().tobytes()


@pytest.mark.parametrize("name", MODELS)
def test_workers_see_the_servers_values_after_every_step_and_from_a_new_primary(name: str) -> None:
    model = MODELS[name]()
    layout = lay_out(model)
    shapes = cut(layout, Recipe(lambda p: torch.optim.SGD(p, lr=0.1), list(model.parameters())))
    servers, mine = Servers(shapes), Segment.private(layout.size_bytes)
    mapped = MappedValues(mine, servers.memory.__getitem__)
    seen = mine.tensor(torch.uint8, 0, layout.size_bytes)  # stays valid whatever is mapped there
    for step in range(6):
        expected = torch.randint(0, 255, (layout.size_bytes,), dtype=torch.uint8)
        for shape in shapes:
            server = (step + shape.number) // 3 % 2
            servers.write(server, shape, expected)
            mapped.take(shape, f"{server}/{shape.number}")
        for shape in shapes:
            assert torch.equal(seen[shape.first_byte : shape.end_byte], expected[shape.first_byte : shape.end_byte])
    servers.memory.clear()  # a server's death takes no values away
    gc.collect()
    for shape in shapes:
        assert torch.equal(seen[shape.first_byte : shape.end_byte], expected[shape.first_byte : shape.end_byte])


def test_whole_pages_are_not_copied() -> None:
    shape = SliceShape(0, range(1), 5 * VALUES_AT + 256, 9 * VALUES_AT + 512, (0,), 4 * VALUES_AT + 256)
    assert whole_pages(shape) == (6 * VALUES_AT, 9 * VALUES_AT)
    servers, mine = Servers([shape]), Segment.private(10 * VALUES_AT)
    MappedValues(mine, servers.memory.__getitem__).take(shape, "0/0")
    seen = mine.tensor(torch.uint8, 0, mine.size_bytes)
    servers.write(0, shape, torch.ones(mine.size_bytes, dtype=torch.uint8))
    assert seen.nonzero().flatten().tolist() == list(range(6 * VALUES_AT, 9 * VALUES_AT))


class MappingMember(ParameterServerMember):
    _maps_values = True


def test_a_later_generation_that_copies_does_not_write_to_a_server() -> None:
    """One in which a member on another host has come: nobody maps anything any more."""
    model = MODELS["slices within pages"]()
    layout = lay_out(model)
    recipe = Recipe(lambda p: torch.optim.SGD(p, lr=0.1), list(model.parameters()))
    computer = ShardComputer(SimpleNamespace(compile=False), model, layout, torch.device("cpu"))  # type: ignore[arg-type]
    own: dict[str, Segment] = {}
    servers = Servers(cut(layout, recipe))

    def member(maps: bool) -> MappingMember:
        segments: Any = SimpleNamespace(segment=servers.memory.__getitem__) if maps else None
        exchange = ServerExchange(0, 1, None, None, Abort(), layout.size_bytes, segments, own)  # type: ignore[arg-type]
        return MappingMember(computer, recipe, Schedule(8, 8, 1), None, exchange, None, None)  # type: ignore[arg-type]

    def take(one: MappingMember, values: torch.Tensor) -> None:
        for shape in cut(layout, recipe):
            segment = f"0/{shape.number}" if one.exchange.maps else ""
            stretch = values[shape.first_byte : shape.end_byte].numpy().tobytes()
            one._take(PulledValues(0, shape.number, 0, segment=segment), None if segment else bytearray(stretch))

    before, after = (torch.full((layout.size_bytes,), one, dtype=torch.uint8) for one in (1, 2))
    for shape in cut(layout, recipe):
        servers.write(0, shape, before)
    take(member(maps=True), before)
    weight = model[0].weight.detach().view(torch.uint8)
    assert weight.eq(1).all()
    take(member(maps=False), after)
    assert model[0].weight.detach().view(torch.uint8).eq(2).all()
    assert weight.eq(1).all()
