"""Snapshots: their memory, how often they are taken, and what is kept when taking one fails."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from distbelief.checkpoint.rules.boxes import Box, sizes, whole
from distbelief.strategies.mesh.state.memberstate import Forms
from distbelief.strategies.mesh.state.snapshots import FIRST_INTERVAL, LONGEST_INTERVAL, PRICE, Snapshot, interval

FORMS: Forms = {
    "a": (torch.float32, (5, 3)),
    "flag": (torch.uint8, ()),
    "half": (torch.bfloat16, (7,)),
    "wide": (torch.float64, ()),
    "none": (torch.int64, (0, 4)),
    "yes": (torch.bool, (3,)),
}


def test_values_go_in_and_come_out_and_nothing_overlaps() -> None:
    boxes: dict[str, Box] = {name: whole(shape) for name, (_, shape) in FORMS.items()}
    boxes["a"] = ((1, 4), (0, 3))
    one = Snapshot.empty(6, boxes, FORMS)
    generator = torch.Generator().manual_seed(1)
    values = {
        name: torch.randint(0, 2, sizes(box), generator=generator).to(FORMS[name][0]) for name, box in boxes.items()
    }
    for name, value in values.items():
        box, memory = one.pieces[name]
        assert (box, memory.dtype, tuple(memory.shape)) == (boxes[name], value.dtype, sizes(box))
        memory.copy_(value)
    again = Snapshot.empty(6, boxes, FORMS)
    again.memory.copy_(one.memory)  # what goes over the wire is the memory
    assert again.step == 6
    for name, value in values.items():
        assert torch.equal(again.pieces[name][1], value)


def test_nothing_at_all_takes_no_memory() -> None:
    assert Snapshot.empty(0, {}, {}).memory.numel() == 0


@given(st.floats(1e-6, 100), st.floats(1e-6, 100))
def test_snapshots_take_their_price_and_no_more(took_s: float, step_s: float) -> None:
    steps = interval(took_s, step_s)
    assert 1 <= steps <= LONGEST_INTERVAL
    if steps < LONGEST_INTERVAL:
        assert took_s / (steps * step_s) <= PRICE * (1 + 1e-9)
    if 1 < steps < LONGEST_INTERVAL:
        assert took_s / ((steps - 1) * step_s) > PRICE * (1 - 1e-9)


def test_before_anything_is_known_there_is_a_first_interval() -> None:
    assert interval(5.0, 0.0) == FIRST_INTERVAL
