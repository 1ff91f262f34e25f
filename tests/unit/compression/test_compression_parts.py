"""Parameters encoded one by one: what arrives and what is owed is what was to be sent, and nobody depends on others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distbelief.compression.parts import PartsCoding
from distbelief.transport.exchange import CompressedParameter
from distbelief.transport.shm.segment import Segment

PLACES = [
    CompressedParameter(0, 0, (40, 5)),
    CompressedParameter(1, 256, (0,)),
    CompressedParameter(2, 256, (7,)),
    CompressedParameter(3, 320, (3, 2)),
]
ELEMENTS = 384
METHODS = ["bf16", "int8=16", "topk=0.1"]
ALL = np.ones(4, np.uint8)


def slot_with(values: torch.Tensor) -> Segment:
    slot = Segment.private(4 * ELEMENTS)
    slot.tensor(torch.float32, 0, ELEMENTS).copy_(values)
    return slot


def random(seed: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("method", METHODS)
def test_what_is_sent_and_what_is_owed_is_the_sum_of_all(method: str) -> None:
    coding = PartsCoding(method, PLACES)
    rest, sent, wanted = torch.zeros(coding.elements), torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    for number in range(5):
        slot, code = slot_with(random(number)), coding.room()
        coding.write(slot, rest, ALL, code)
        for part in coding.parts:
            mine, theirs = coding.vector(part, slot), torch.empty(part.rest.stop - part.rest.start)
            coding.read(part, code, theirs)
            assert torch.equal(mine, theirs), "in the slot is what others decode"
            sent[part.place.part] += theirs
            wanted[part.place.part] += random(number)[part.place.part]
    assert bool(rest.any())
    for part in coding.parts:
        torch.testing.assert_close(sent[part.place.part] + rest[part.rest], wanted[part.place.part], rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_parameter_that_was_not_touched_sends_nothing_and_owes_what_it_owed(method: str) -> None:
    coding = PartsCoding(method, PLACES)
    rest = torch.ones(coding.elements)
    slot = slot_with(torch.zeros(ELEMENTS))
    coding.write(slot, rest, np.array([1, 0, 0, 1]), coding.room())
    first, second, third = coding.parts
    assert bool(coding.vector(first, slot).any())
    assert bool(coding.vector(third, slot).any())
    assert not coding.vector(second, slot).any()
    assert rest[second.rest].tolist() == [1.0] * 7


@pytest.mark.parametrize("method", METHODS)
def test_a_parameter_does_not_depend_on_those_beside_it(method: str) -> None:
    alone, together = PartsCoding(method, PLACES[2:3]), PartsCoding(method, PLACES)
    found = []
    for coding, number in ((alone, 0), (together, 1)):
        slot = slot_with(random(3))
        coding.write(slot, torch.zeros(coding.elements), ALL, coding.room())
        found.append(coding.vector(coding.parts[number], slot).clone())
    assert torch.equal(*found)
