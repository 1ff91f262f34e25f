"""The layout: aligned, covered by tiles, every parameter in pieces that are exactly it, and the same for all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from distbelief.errors import JobError
from distbelief.strategies.flatmodel.layout import (
    ALIGN,
    TILE_ELEMENTS,
    TILE_GROUP,
    Layout,
    float_buffers,
    lay_out,
    trainable,
)

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a noisy machine is no failure

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def model_of(tensors: list[tuple[int, torch.dtype]], buffers: list[tuple[int, torch.dtype]]) -> nn.Module:
    """On the meta device: a layout needs no memory, so a test of large models needs none either."""
    model = nn.Module()
    for number, (numel, dtype) in enumerate(tensors):
        model.register_parameter(f"p{number}", nn.Parameter(torch.empty(numel, dtype=dtype, device="meta")))
    for number, (numel, dtype) in enumerate(buffers):
        model.register_buffer(f"b{number}", torch.empty(numel, dtype=dtype, device="meta"))
    return model


sizes = st.integers(0, 300) | st.integers(0, 3 * TILE_ELEMENTS)
tensors = st.lists(st.tuples(sizes, st.sampled_from(DTYPES)), min_size=1, max_size=12)
models = st.builds(model_of, tensors, tensors | st.just([]))


@patient
@given(models, st.booleans())
def test_every_entry_starts_at_a_multiple_of_64_elements_and_none_overlap(model: nn.Module, whole: bool) -> None:
    layout = lay_out(model, whole_parameters=whole)
    assert ALIGN == 64
    end = 0
    for entry in sorted(layout.entries, key=lambda entry: (entry.offset_bytes, entry.numel)):
        assert entry.offset_bytes % (ALIGN * entry.dtype.itemsize) == 0
        assert entry.offset_bytes >= end
        end = entry.offset_bytes + entry.numel * entry.dtype.itemsize
    assert end <= layout.size_bytes
    assert [layout.entries[i].name for i in layout.entries_of("parameter")] != []


@patient
@given(models, st.booleans())
def test_tiles_follow_each_other_and_cover_everything(model: nn.Module, whole: bool) -> None:
    layout = lay_out(model, whole_parameters=whole)
    assert [tile.index for tile in layout.tiles] == list(range(len(layout.tiles)))
    end = 0
    for tile in layout.tiles:
        assert tile.numel > 0
        assert tile.numel % ALIGN == 0
        assert tile.offset_bytes % (ALIGN * tile.dtype.itemsize) == 0
        assert tile.offset_bytes >= end
        end = tile.offset_bytes + tile.size_bytes
    assert end <= layout.size_bytes
    check_pieces(layout)


def check_pieces(layout: Layout) -> None:
    """Each entry is cut into pieces that together are exactly it, at the same place, with cuts at multiples of 64."""
    found: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(layout.entries))}
    for tile, pieces in zip(layout.tiles, layout.pieces, strict=True):
        assert pieces, "a tile that nobody fills would never be ready"
        for piece in pieces:
            entry = layout.entries[piece.entry]
            assert (entry.kind == "parameter") == (tile.index < layout.parameter_tiles)
            assert entry.dtype == tile.dtype
            assert piece.first % ALIGN == 0
            assert piece.tile_first % ALIGN == 0
            assert piece.tile_first + piece.numel <= tile.numel
            size = tile.dtype.itemsize
            assert tile.offset_bytes + piece.tile_first * size == entry.offset_bytes + piece.first * size
            found[piece.entry].append((piece.first, piece.first + piece.numel))
    for index, spans in found.items():
        edges = [0] + [end for _, end in sorted(spans)]
        assert [first for first, _ in sorted(spans)] == edges[:-1]
        assert edges[-1] == layout.entries[index].numel


@patient
@given(models)
def test_whole_parameters_lie_in_one_tile_each(model: nn.Module) -> None:
    layout = lay_out(model, whole_parameters=True)
    seen = [piece.entry for pieces in layout.pieces for piece in pieces]
    assert len(seen) == len(set(seen))


@patient
@given(models, st.sets(st.integers(0, 11)))
def test_some_parameters_are_kept_whole_and_the_others_stay_where_they_were(model: nn.Module, whole: set[int]) -> None:
    plain, layout = lay_out(model), lay_out(model, whole=whole)
    check_pieces(layout)
    assert layout.entries == plain.entries
    assert layout.size_bytes == plain.size_bytes
    seen = [piece.entry for pieces in layout.pieces for piece in pieces if piece.entry in whole]
    assert len(seen) == len(set(seen))
    for piece in (piece for pieces in layout.pieces for piece in pieces if piece.entry not in whole):
        cuts = {(one.entry, one.first) for pieces in plain.pieces for one in pieces}
        assert (piece.entry, piece.first) in cuts, "no other parameter gets another cut"


@patient
@given(models)
def test_the_layout_is_a_function_of_the_model_alone(model: nn.Module) -> None:
    assert lay_out(model) == lay_out(model)


def test_entries_lie_together_by_type_and_are_numbered_as_parameters_are() -> None:
    """Everybody else numbers parameters as `trainable` does: entry i must be parameter i, whatever the types."""
    model = model_of([(3, torch.float32), (5, torch.float64), (70, torch.float32)], [(2, torch.float32)])
    layout = lay_out(model)
    assert [e.name for e in layout.entries] == [*(name for name, _ in trainable(model)), "b0"]
    assert {e.name: e.offset_bytes for e in layout.entries} == {"p0": 0, "p2": 256, "p1": 4096, "b0": 8192}
    assert [(t.dtype, t.numel) for t in layout.tiles] == [
        (torch.float32, 192),
        (torch.float64, 64),
        (torch.float32, 64),
    ]
    assert layout.parameter_tiles == 2


def test_a_large_model_gives_equal_shares_to_2_4_or_8_workers() -> None:
    layout = lay_out(model_of([(20 * TILE_ELEMENTS + 1, torch.float32)], []))
    assert len(layout.tiles) % TILE_GROUP == 0
    assert max(t.numel for t in layout.tiles) <= TILE_ELEMENTS


def test_a_small_model_is_one_tile_and_a_middling_one_is_spread() -> None:
    assert len(lay_out(model_of([(100, torch.float32)] * 3, [])).tiles) == 1
    assert len(lay_out(model_of([(TILE_ELEMENTS // 2, torch.float32)], [])).tiles) == TILE_GROUP


class Special(nn.Module):
    """Tied weights, a frozen layer, integer and float buffers, a scalar, an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("constant", torch.ones(3, dtype=torch.float64), persistent=False)


def test_tied_weights_are_there_once_and_frozen_ones_are_not() -> None:
    model = Special()
    layout = lay_out(model)
    names = [layout.entries[i].name for i in layout.entries_of("parameter")]
    assert names == ["scale", "nothing", "embedding.weight", "norm.weight", "norm.bias"]
    assert names == [name for name, _ in trainable(model)]
    check_pieces(layout)


def test_float_buffers_are_laid_out_and_integer_ones_are_not() -> None:
    model = Special()
    layout = lay_out(model)
    buffers = [layout.entries[i].name for i in layout.entries_of("buffer")]
    assert sorted(buffers) == ["constant", "norm.running_mean", "norm.running_var"]
    assert sorted(name for name, _ in float_buffers(model)) == sorted(buffers)


@pytest.mark.parametrize("whole", [False, True])
def test_a_model_whose_only_buffer_is_empty_has_no_buffer_tiles(whole: bool) -> None:
    layout = lay_out(model_of([(100, torch.float32)], [(0, torch.float32)]), whole_parameters=whole)
    assert layout.parameter_tiles == len(layout.tiles) == 1


def test_what_cannot_be_added_up_is_refused_by_name() -> None:
    model = nn.Module()
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(JobError, match="'phase' is complex"):
        lay_out(model)
    model = nn.Module()
    model.graph = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(JobError, match=r"'graph' is a .*sparse.* tensor"):
        lay_out(model)
