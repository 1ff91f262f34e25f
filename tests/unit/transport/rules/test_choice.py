"""The choice of a generation's transport."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distbelief.transport.rules import choice

members = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["", "gpu 0", "gpu 1", "gpu 2"])), min_size=1)


@given(st.sampled_from(get_args(choice.Wished)), members, st.booleans())
def test_a_possible_transport_has_what_it_requires(
    wished: str, there: list[tuple[str, str]], on_accelerators: bool
) -> None:
    hosts, gpus = sorted({host for host, _ in there}), [gpu for _, gpu in there]
    transport, problem = choice.choose(wished, hosts, gpus, on_accelerators)
    assert not problem or wished in ("shm", "nccl"), "auto and gloo are always possible"
    if problem:
        return
    assert not choice.shares_memory(transport) or len(hosts) == 1
    assert not choice.shares_state(transport) or not on_accelerators
    assert not choice.needs_gpus(transport) or len(gpus) == 1 or len(set(gpus) - {""}) == len(gpus)


@pytest.mark.parametrize(
    ("transport", "memory", "state", "gpus"),
    [
        ("shm", True, True, False),
        ("slots", True, False, False),
        ("gloo", False, False, False),
        ("nccl", False, False, True),
    ],
)
def test_each_transport(transport: str, memory: bool, state: bool, gpus: bool) -> None:
    found = choice.shares_memory(transport), choice.shares_state(transport), choice.needs_gpus(transport)
    assert found == (memory, state, gpus)
