"""A checkpoint that real members took while they trained, loaded by any other number of them over any transport: the
bits of the run are those of a run that was never interrupted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from distbelief.checkpoint.saving import seal
from tests.support.replicas.member import STEPS, Place
from tests.support.replicas.saving import Left, Saving
from tests.support.stage import Stage

MEMBER = "tests.support.replicas.saving"
SHARDS, HALF_WAY = 8, 4

_names = itertools.count()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def trained(stage: Stage, size: int, saving: Saving, port: int = 0) -> list[Left]:
    ranges = tuple((rank * SHARDS // size, (rank + 1) * SHARDS // size) for rank in range(size))
    name, transport = f"saving {next(_names)}", "torch" if port else "shared"
    places = [Place(rank, ranges, transport, port, name) for rank in range(size)]
    return stage.play(MEMBER, "train", [{"place": place, "saving": saving} for place in places])


@pytest.mark.parametrize("torch_group", [False, True], ids=["shared memory", "torch group"])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 1)])
def test_other_members_go_on_from_a_checkpoint_with_the_same_bits(
    stage: Stage, port: int, tmp_path: Path, before: int, after: int, torch_group: bool
) -> None:
    folder = str(tmp_path / "checkpoints")
    first = trained(stage, before, Saving(folder, save=HALF_WAY), port if torch_group else 0)
    parts = [left.part for left in first if left.part]
    assert len(parts) == before
    seal(folder, HALF_WAY, first[-1].facts, parts)
    # The other transport loads it: neither knows how the other lays its members out.
    later = trained(stage, after, Saving(folder, load=HALF_WAY), 0 if torch_group else port)
    assert {left.sha256 for left in later} == {left.sha256 for left in first}
    assert len(first[0].fingerprints) == STEPS
    assert {tuple(left.fingerprints) for left in later} == {tuple(first[0].fingerprints[HALF_WAY:])}
