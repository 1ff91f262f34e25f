"""The contract of exchanges: shared memory and torch groups add up the same bits and keep the same promises, and so
does a member without any other, as far as a single member can. Those that compress keep all promises but that of the
same bits; their own ones are in test_compressed.py."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.support.exchange.member import SIZES, Seat
from tests.support.exchange.takeover import POINTS
from tests.support.stage import Stage

MEMBER = "tests.support.exchange.member"
TAKEOVER = "tests.support.exchange.takeover"
KINDS = ["shared", "torch"]
ON_DEVICE = ["slots", "slots on device", "torch on device", "device group"]
COMPRESSED = ["int8", "powersgd=2"]
MEMBERS = [1, 2, 3, 5]
GROUPS = [("alone", 1), *itertools.product(KINDS, MEMBERS), *itertools.product(ON_DEVICE, [1, 3])]

_names = itertools.count()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def seats(kind: str, port: int, size: int, shards: int, tiles: str = "mixed") -> list[dict[str, Any]]:
    name = f"group {next(_names)}"
    return [{"seat": Seat(kind, name, port, rank, size, shards, tiles)} for rank in range(size)]


def union(parts: list[dict[int, str]]) -> dict[int, str]:
    """The digests of all tiles; members that have the same tile must agree."""
    whole: dict[int, str] = {}
    for part in parts:
        for tile, digest in part.items():
            assert whole.setdefault(tile, digest) == digest
    return whole


@pytest.mark.parametrize("shards", [1, 4, 8, 7])
def test_the_sum_is_the_trees_bit_for_bit_for_any_number_of_members(stage: Stage, port: int, shards: int) -> None:
    found = {
        (kind, size): union(stage.play(MEMBER, "reduce_steps", seats(kind, port, size, shards)))
        for kind, size in GROUPS
    }
    alone = found["shared", 1]
    assert sorted(alone) == list(range(len(SIZES["mixed"])))
    assert all(digests == alone for digests in found.values())


@pytest.mark.parametrize("kind", KINDS)
def test_members_may_outnumber_the_tiles(stage: Stage, port: int, kind: str) -> None:
    few = [union(stage.play(MEMBER, "reduce_steps", seats(kind, port, size, 8, "few"))) for size in (1, 5)]
    assert few[0] == few[1]


@pytest.mark.parametrize("size", MEMBERS)
def test_in_shared_memory_every_tile_has_one_owner_elsewhere_everybody_has_all(
    stage: Stage, port: int, size: int
) -> None:
    everything = list(range(len(SIZES["mixed"])))
    shared = stage.play(MEMBER, "tiles_of", seats("shared", port, size, 8))
    assert sorted(itertools.chain(*shared)) == everything
    assert stage.play(MEMBER, "tiles_of", seats("torch", port, size, 8)) == [everything] * size
    assert stage.play(MEMBER, "tiles_of", seats("alone", port, 1, 8)) == [everything]


@pytest.mark.parametrize(("kind", "size"), [*GROUPS, *itertools.product(COMPRESSED, [1, 3])])
def test_gather_brings_everybodys_bytes_of_any_size(stage: Stage, port: int, kind: str, size: int) -> None:
    stage.play(MEMBER, "gather", seats(kind, port, size, 8))


@pytest.mark.parametrize("kind", [*KINDS, *COMPRESSED])
def test_the_state_is_shared_exactly_where_the_exchange_says_so(stage: Stage, port: int, kind: str) -> None:
    found = stage.play(MEMBER, "keep_state", seats(kind, port, 3, 8))
    shares = kind == "shared"
    assert found == [(shares, [1, 2, 3] if shares else [(r + 1) * (r == i) for i in range(3)]) for r in range(3)]


def test_a_member_that_is_alone_has_its_state_for_itself(stage: Stage, port: int) -> None:
    assert stage.play(MEMBER, "keep_state", seats("alone", port, 1, 8)) == [(False, [1])]


@pytest.mark.parametrize("phase", ["share", "share_squares", "settle", "gather"])
def test_an_abort_ends_the_wait_for_a_member_that_never_arrives(stage: Stage, port: int, phase: str) -> None:
    members = [{**member, "phase": phase} for member in seats("shared", port, 3, 8)]
    found = stage.play(MEMBER, "wait_in_vain", members)
    assert found == ["member 2 was lost", "member 2 was lost", "left"]


@pytest.mark.parametrize("kind", [*KINDS, *COMPRESSED])
def test_an_abort_that_came_first_ends_the_first_wait(stage: Stage, port: int, kind: str) -> None:
    members = seats(kind, port, 2, 8)
    assert stage.play(MEMBER, "come_too_late", members) == ["the run ends"] * 2


@pytest.mark.parametrize("kind", ["torch", *COMPRESSED])
@pytest.mark.parametrize("phase", ["meet", "share", "reduced", "gather", "receive"])
def test_an_abort_from_another_thread_ends_a_torch_groups_wait_for_a_peer_that_lives(
    stage: Stage, port: int, phase: str, kind: str
) -> None:
    """gloo itself would wait for minutes; the peer gives no sign, neither data nor the end of the connection."""
    members = [{**member, "phase": phase} for member in seats(kind, port, 2, 8)]
    assert stage.play(MEMBER, "wait_for_the_living", members) == ["member 1 does not come", "idle"]


def test_a_member_that_was_called_away_from_one_meeting_is_met_at_the_next(stage: Stage, port: int) -> None:
    assert stage.play(MEMBER, "meet_at_the_second_attempt", seats("torch", port, 2, 8)) == [2, 2]


@pytest.mark.parametrize(("kind", "size"), [("torch", 2), ("torch", 3), ("torch", 5), ("int8", 3)])
def test_a_newcomer_is_given_the_state(stage: Stage, port: int, kind: str, size: int) -> None:
    assert stage.play(MEMBER, "hand_over", seats(kind, port, size, 8)) == ["the same"] * size


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("by_signal", [False, True])
@pytest.mark.parametrize("point", POINTS)
def test_the_next_generation_finishes_a_step_with_what_was_published(
    stage: Stage, point: str, by_signal: bool, size: int
) -> None:
    members = [{**member, "point": point, "by_signal": by_signal} for member in seats("shared", 0, size, 8)]
    *survivors, dead = stage.outcomes(TAKEOVER, "finish", members)
    assert not [one.error for one in survivors if one.error]
    assert dead.status == (-signal.SIGKILL if by_signal else 7)
    assert len({str(one.value) for one in survivors}) == 1, "all see the same"
    held, recomputed = survivors[0].value
    arrived = size if point == "arrived" else size - 1
    assert {one.source.rank for one in held} == set(range(arrived)), "the dead one's partial sums too, if it had told"
    assert recomputed == (size - arrived) * 8 // size


@pytest.mark.parametrize("kind", ["torch", *COMPRESSED])
def test_a_peer_that_dies_aborts_a_torch_group(stage: Stage, port: int, kind: str) -> None:
    survivor, dead = stage.outcomes(MEMBER, "lose_a_peer", seats(kind, port, 2, 8))
    assert dead.status == -signal.SIGKILL
    assert "connection between members broke" in survivor.value, survivor
