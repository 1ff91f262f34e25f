"""Where parameters are cut for servers: a function of the model, and all of it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from distbelief.strategies.flatmodel.layout import lay_out
from distbelief.strategies.flatmodel.namedtensors import TilePortion
from distbelief.strategies.flatmodel.tileoptimizer import Recipe, state_bytes
from distbelief.strategies.ps.rules.slicing import FEWEST_SLICES, MOST_SLICES, cut


def parts(model: nn.Module) -> tuple[object, object]:
    recipe = Recipe(lambda p: torch.optim.Adam(p, lr=0.1), list(model.parameters()))
    return lay_out(model), recipe


MODELS = {
    "one number": lambda: nn.Linear(1, 1, bias=False),
    "small": lambda: nn.Linear(6, 16),
    "buffers": lambda: nn.Sequential(nn.Linear(60, 200), nn.BatchNorm1d(200)),
    "large": lambda: nn.Sequential(nn.Linear(3000, 2000), nn.BatchNorm1d(2000), nn.Linear(2000, 10)),
    "larger": lambda: nn.Linear(4000, 3000),
    "mixed": lambda: nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 300).double()),
}


@pytest.mark.parametrize("name", MODELS)
def test_slices_are_all_of_the_model_each_tile_once(name: str) -> None:
    layout, recipe = parts(MODELS[name]())
    slices = cut(layout, recipe)
    assert [tile for one in slices for tile in one.tiles] == list(range(len(layout.tiles)))
    assert [one.number for one in slices] == list(range(len(slices)))
    assert 1 <= len(slices) <= MOST_SLICES
    for one in slices:
        first, last = layout.tiles[one.tiles[0]], layout.tiles[one.tiles[-1]]
        assert (one.first_byte, one.end_byte) == (first.offset_bytes, last.offset_bytes + last.size_bytes)
        assert one.first_byte % 64 == 0
        sizes = [state_bytes(recipe, layout, t) if t < layout.parameter_tiles else 0 for t in one.tiles]
        assert list(one.state_bytes) == sizes
        assert one.size_bytes == sum(layout.tiles[t].size_bytes for t in one.tiles) + sum(sizes)
    for one, other in itertools.pairwise(slices):
        assert one.end_byte <= other.first_byte
    whole = TilePortion(layout, recipe, range(len(layout.tiles)), [])
    assert whole.size_bytes == sum(one.size_bytes for one in slices)  # as a checkpoint has them, one after the other


@pytest.mark.parametrize("name", MODELS)
def test_the_same_model_is_cut_at_the_same_places(name: str) -> None:
    assert cut(*parts(MODELS[name]())) == cut(*parts(MODELS[name]()))


@pytest.mark.parametrize(("name", "count"), [("large", 8), ("larger", MOST_SLICES)])
def test_large_models_are_cut_evenly(name: str, count: int) -> None:
    layout, recipe = parts(MODELS[name]())
    sizes = [one.size_bytes for one in cut(layout, recipe)]
    assert len(sizes) == count
    largest_tile = max(tile.size_bytes + state_bytes(recipe, layout, tile.index) for tile in layout.tiles)
    assert max(sizes) <= sum(sizes) / count + largest_tile


def test_small_models_have_some_slices() -> None:
    assert len(cut(*parts(MODELS["buffers"]()))) == FEWEST_SLICES
