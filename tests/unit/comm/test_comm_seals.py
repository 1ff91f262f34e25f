"""Seals and badges: who says it, for the first time, and for nobody else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from distbelief.control import signatures as seals
from distbelief.control.credentials import Authority, Badge
from distbelief.control.signatures import Checker, Claim, Refusals, Refused, Signer

AUTHORITY = Authority(bytes(range(32)), "first")


def reason(checker: Checker, seal: bytes, message: bytes, now: float = 0.0) -> str:
    try:
        checker.check(seal, message, now)
    except Refused as refused:
        return refused.reason
    return ""


@pytest.mark.parametrize("badge", [AUTHORITY.owner(), AUTHORITY.worker(3), AUTHORITY.server(0)])
def test_the_coordinator_knows_who_speaks(badge: Badge) -> None:
    checker, signer = AUTHORITY.checker(), badge.signer()
    for message in (b"one", b"", b"one"):
        assert checker.check(signer.seal(message), message) == (badge.role, badge.number)


def test_servers_know_who_speaks() -> None:
    checker = AUTHORITY.server(5).checker()
    for badge in (AUTHORITY.worker(3), AUTHORITY.server(0)):
        assert checker.check(badge.signer_to_servers().seal(b"m"), b"m") == (badge.role, badge.number)
    assert reason(checker, AUTHORITY.owner().signer().seal(b"m"), b"m") == seals.WRONG_SEAL


@given(some.binary(max_size=80), some.integers(0, 200), some.integers(1, 255))
def test_whatever_is_changed_is_refused(message: bytes, place: int, by: int) -> None:
    seal = AUTHORITY.worker(3).signer().seal(message)
    whole = bytearray(seal + message)
    whole[place % len(whole)] ^= by
    changed = bytes(whole[: len(seal)]), bytes(whole[len(seal) :])
    assert reason(AUTHORITY.checker(), *changed) == seals.WRONG_SEAL


@given(some.binary(max_size=100))
def test_what_is_no_seal_is_refused(seal: bytes) -> None:
    assert reason(AUTHORITY.checker(), seal, b"") in (seals.NO_SEAL, seals.WRONG_SEAL)


def test_what_comes_again_or_late_is_refused() -> None:
    checker, signer = AUTHORITY.checker(), AUTHORITY.worker(3).signer()
    first, second, third = (signer.seal(b"m") for _ in range(3))
    assert not reason(checker, first, b"m")
    assert reason(checker, first, b"m") == seals.SEEN_BEFORE
    assert not reason(checker, third, b"m")
    assert reason(checker, second, b"m") == seals.SEEN_BEFORE


def test_a_clock_that_is_set_back_silences_nobody() -> None:
    times = iter([1000, 10, 20, 2000])
    signer = Signer("worker", 3, AUTHORITY.worker(3).token, lambda: next(times))
    checker = AUTHORITY.checker()
    assert not any(reason(checker, signer.seal(b"m"), b"m") for _ in range(4))


def test_senders_do_not_disturb_each_other() -> None:
    checker = AUTHORITY.checker()
    ahead = Signer("worker", 1, AUTHORITY.worker(1).token, lambda: 1 << 62)
    assert not reason(checker, ahead.seal(b"m"), b"m")
    assert not reason(checker, AUTHORITY.worker(2).signer().seal(b"m"), b"m")
    assert not reason(checker, AUTHORITY.owner().signer().seal(b"m"), b"m")


def test_a_member_cannot_be_another_one() -> None:
    mine = AUTHORITY.worker(3)
    for role, number in (("worker", 4), ("server", 3), ("owner", 3)):
        seal = Signer(role, number, mine.token).seal(b"m")
        assert reason(AUTHORITY.checker(), seal, b"m") == seals.WRONG_SEAL
        seal = Signer(role, number, mine.among).seal(b"m")
        assert reason(AUTHORITY.checker(), seal, b"m") == seals.WRONG_SEAL
        assert role == "owner" or reason(AUTHORITY.server(0).checker(), seal, b"m") == seals.WRONG_SEAL


def test_a_server_speaks_for_workers_to_servers_at_most() -> None:
    badge = AUTHORITY.server(0)
    for token in (badge.token, badge.among, seals.token_of(badge.among, "worker", 3)):
        assert reason(AUTHORITY.checker(), Signer("worker", 3, token).seal(b"m"), b"m") == seals.WRONG_SEAL


def test_members_of_another_start_or_run_are_strangers_but_an_owner_with_the_key_is_not() -> None:
    other, again = Authority(bytes(32), "first"), Authority(AUTHORITY.secret, "second")
    for one in (other.worker(3), other.owner(), again.worker(3), again.server(3)):
        assert reason(AUTHORITY.checker(), one.signer().seal(b"m"), b"m") == seals.WRONG_SEAL
    assert not reason(AUTHORITY.checker(), again.owner().signer().seal(b"m"), b"m")
    assert again.owner().door == AUTHORITY.worker(3).door != other.worker(3).door
    assert again.worker(3).servers_door != AUTHORITY.worker(3).servers_door


def test_a_flood_is_cut_and_others_are_heard() -> None:
    checker = Checker({"worker": b"k"}, burst=10, per_s=5)
    loud, quiet = (Signer("worker", n, seals.token_of(b"k", "worker", n)) for n in (1, 2))
    assert [reason(checker, loud.seal(b"m"), b"m") for _ in range(12)] == [""] * 10 + [seals.TOO_MANY] * 2
    assert not reason(checker, quiet.seal(b"m"), b"m")
    assert [reason(checker, loud.seal(b"m"), b"m", now=1.0) for _ in range(6)] == [""] * 5 + [seals.TOO_MANY]


def test_only_so_many_are_remembered_and_those_forgotten_cannot_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seals, "REMEMBERED", 100)
    checker = AUTHORITY.checker()
    first = AUTHORITY.owner().signer().seal(b"m")
    assert not reason(checker, first, b"m")
    for _ in range(150):
        assert not reason(checker, AUTHORITY.owner().signer().seal(b"m"), b"m")
    for number in range(1000):
        assert reason(checker, Signer("worker", number, b"none").seal(b"m"), b"m") == seals.WRONG_SEAL
    assert len(checker._known) == 100
    assert reason(checker, first, b"m") == seals.SEEN_BEFORE


def test_a_badge_travels_and_does_not_show_what_it_holds() -> None:
    badge = AUTHORITY.worker(3)
    assert msgspec.convert(msgspec.to_builtins(badge), Badge) == badge
    for shown in (repr(badge), str(badge), repr(AUTHORITY)):
        for secret in (badge.token, badge.among, AUTHORITY.secret):
            assert repr(secret) not in shown
            assert secret.hex() not in shown


def test_refusals_are_said_now_and_then() -> None:
    refusals = Refusals()
    assert refusals.news(0.0) == ""
    refusals.add("not a message")
    assert refusals.news(1.0) == "refused 1 message: 1 not a message"
    for _ in range(1000):
        refusals.add("seen before")
        assert refusals.news(2.0) == ""
    assert refusals.news(12.0) == "refused 1001 messages: 1000 seen before, 1 not a message"
    assert refusals.news(30.0) == ""


def test_a_claim_is_a_pair() -> None:
    assert Claim("worker", 3) == ("worker", 3)
