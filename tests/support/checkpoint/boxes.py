"""Random tensors, and random ways to cut them into boxes or stretches."""

from __future__ import annotations

import itertools
from math import prod

import torch
from hypothesis import strategies as st

from distbelief.checkpoint.parts import Slice
from distbelief.checkpoint.rules import boxes
from distbelief.checkpoint.rules.boxes import Box

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint16]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """All elements differ, as far as the type can tell them apart; NaNs among them."""
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    count = prod(shape) * dtype.itemsize
    values = torch.arange(count, dtype=torch.int64).to(torch.uint8)
    if dtype == torch.bool:
        return (values % 3 == 0).view(shape)
    return values.view(dtype).view(shape)


@st.composite
def boxes_within(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Any box, empty ones too."""
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return tuple((start, end) for start, end in ends)


@st.composite
def cuts_of(draw: st.DrawFn, box: Box, depth: int = 4) -> list[Box]:
    """The box cut in two somewhere, and the halves again."""
    wide = [k for k, size in enumerate(boxes.sizes(box)) if size > 1]
    if not wide or not depth or draw(st.booleans()):
        return [box]
    k = draw(st.sampled_from(wide))
    at = draw(st.integers(box[k][0] + 1, box[k][1] - 1))
    halves = [(*box[:k], bounds, *box[k + 1 :]) for bounds in ((box[k][0], at), (at, box[k][1]))]
    return [piece for half in halves for piece in draw(cuts_of(half, depth - 1))]


@st.composite
def pieces_of(draw: st.DrawFn, name: str, tensor: torch.Tensor) -> list[Slice]:
    """All of a tensor: some whole rows of it as boxes, and the others as stretches."""
    shape = tuple(tensor.shape)
    if not shape:
        return [Slice.whole(name, tensor)]
    row = draw(st.integers(0, shape[0]))
    found: list[Slice] = []
    if row:
        cut = draw(cuts_of(((0, row), *boxes.whole(shape[1:]))))
        found += [Slice.of_box(name, tensor[boxes.inside(box, boxes.whole(shape))], shape, box) for box in cut]
    first, end = row * prod(shape[1:]), tensor.numel()
    marks = draw(st.lists(st.integers(first, end), max_size=3))
    ends = itertools.pairwise(sorted({first, end, *marks}))
    found += [Slice(name, tensor.reshape(-1)[a:b], shape, a) for a, b in ends]
    return draw(st.permutations(found))


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.dtype == other.dtype and one.shape == other.shape
    flat = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return alike and torch.equal(*flat)
