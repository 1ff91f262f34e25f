"""Words: members that meet in shared memory see each other's writes, never hang with few cores, and can be aborted."""

from __future__ import annotations

import os

import pytest

from distbelief.transport.abort import Abort, Aborted
from distbelief.transport.shm.futexflags import flag_row_bytes
from tests.support.stage import Stage

MEMBER = "tests.support.exchange.sharing"


@pytest.mark.parametrize(("size", "rounds"), [(1, 5), (2, 500), (3, 200)])
def test_everybody_sees_what_the_others_wrote_before_a_barrier(stage: Stage, size: int, rounds: int) -> None:
    members = [{"rank": rank, "size": size, "rounds": rounds} for rank in range(size)]
    assert stage.play(MEMBER, "meet_often", members) == [rounds] * size


def test_more_members_than_cores_meet_too(stage: Stage) -> None:
    size = 3 * min(os.cpu_count() or 1, 4) + 1
    members = [{"rank": rank, "size": size, "rounds": 30} for rank in range(size)]
    assert stage.play(MEMBER, "meet_often", members) == [30] * size


def test_an_abort_ends_the_wait_for_a_member_that_never_comes(stage: Stage) -> None:
    members = [{"rank": rank, "size": 3, "absent": 1} for rank in range(3)]
    found = stage.play(MEMBER, "meet_somebody_who_never_comes", members)
    assert found == ["the members change", "absent", "the members change"]


def test_a_word_that_changes_without_a_bell_is_seen(stage: Stage) -> None:
    assert stage.play(MEMBER, "hear_a_quiet_word", [{"rank": 0}, {"rank": 1}]) == [41, 41]


def test_rows_are_whole_cache_lines() -> None:
    assert [flag_row_bytes(words) for words in (0, 1, 15, 16, 31)] == [64, 64, 64, 128, 128]


def test_an_abort_stays_set_and_always_has_a_reason() -> None:
    abort = Abort()
    abort.check()
    abort.set("")
    for _ in range(2):
        with pytest.raises(Aborted, match="aborted"):
            abort.check()
