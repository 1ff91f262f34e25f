"""Hundreds of regroups leave nothing behind: no descriptor, thread, mapping, torch group or segment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore

from tests.support.stage import Stage

REGROUPING = "tests.support.exchange.regrouping"
REGROUPS = {"shared": 200, "torch": 100}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def growth(held: list[dict[str, int]]) -> dict[str, int]:
    """How much more is held at the end than after the first tenth. What is closed a moment later does not count."""
    tenth = len(held) // 10
    begin, end = held[tenth : 2 * tenth], held[-tenth:]
    return {what: min(one[what] for one in end) - max(one[what] for one in begin) for what in held[0]}


@pytest.mark.parametrize("kind", REGROUPS)
def test_regroups_leave_nothing_behind(stage: Stage, port: int, kind: str) -> None:
    members = [{"kind": kind, "port": port, "rank": rank, "generations": REGROUPS[kind]} for rank in range(3)]
    for held in stage.play(REGROUPING, "regroup_often", members):
        assert len(held) >= REGROUPS[kind] // 2
        # The allocator of C may take another mapping now and then; a leak grows with every regroup.
        assert max(growth(held).values()) <= len(held) // 10, growth(held)
        assert all(one["groups"] == 0 for one in held)


def test_what_is_left_behind_is_noticed(stage: Stage, port: int) -> None:
    common = {"kind": "shared", "port": port, "generations": 40, "forgets": False}
    first, *_ = stage.play(REGROUPING, "regroup_often", [{**common, "rank": rank} for rank in range(3)])
    assert growth(first)["descriptors of the segments' server"] >= 30
