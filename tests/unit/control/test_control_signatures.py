"""Signatures and credentials: a message counts once, and only for its own sender."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from distbelief.control import signatures
from distbelief.control.credentials import Authority, Credential, KeyAuthority
from distbelief.control.signatures import Refusals, Refused, Sender, Signer, Verifier

KEY = KeyAuthority(bytes(range(32)), "first")
AUTHORITY = KEY.run


def reason(verifier: Verifier, signature: bytes, message: bytes, now: float = 0.0) -> str:
    try:
        verifier.verify(signature, message, now)
    except Refused as refused:
        return refused.reason
    return ""


@pytest.mark.parametrize(
    "credential", [AUTHORITY.owner(), AUTHORITY.agent(), AUTHORITY.worker(3), AUTHORITY.server(0), KEY.applicant()]
)
def test_the_coordinator_knows_who_speaks(credential: Credential) -> None:
    verifier, signer = KEY.verifier(), credential.signer()
    for message in (b"one", b"", b"one"):
        assert verifier.verify(signer.sign(message), message) == (credential.role, credential.number)


def test_servers_know_who_speaks() -> None:
    verifier = AUTHORITY.server(5).verifier()
    for credential in (AUTHORITY.worker(3), AUTHORITY.server(0)):
        assert verifier.verify(credential.signer_to_servers().sign(b"m"), b"m") == (credential.role, credential.number)
    assert reason(verifier, AUTHORITY.owner().signer().sign(b"m"), b"m") == signatures.WRONG_SIGNATURE


@given(some.binary(max_size=80), some.integers(0, 200), some.integers(1, 255))
def test_whatever_is_changed_is_refused(message: bytes, place: int, by: int) -> None:
    signature = AUTHORITY.worker(3).signer().sign(message)
    whole = bytearray(signature + message)
    whole[place % len(whole)] ^= by
    changed = bytes(whole[: len(signature)]), bytes(whole[len(signature) :])
    assert reason(KEY.verifier(), *changed) == signatures.WRONG_SIGNATURE


@given(some.binary(max_size=100))
def test_bytes_that_are_no_signature_are_refused(signature: bytes) -> None:
    assert reason(KEY.verifier(), signature, b"") in (signatures.UNSIGNED, signatures.WRONG_SIGNATURE)


def test_what_comes_again_or_late_is_refused() -> None:
    verifier, signer = KEY.verifier(), AUTHORITY.worker(3).signer()
    first, second, third = (signer.sign(b"m") for _ in range(3))
    assert not reason(verifier, first, b"m")
    assert reason(verifier, first, b"m") == signatures.REPLAYED
    assert not reason(verifier, third, b"m")
    assert reason(verifier, second, b"m") == signatures.LATE, "it was never heard"
    assert reason(verifier, second, b"m") == signatures.REPLAYED
    assert reason(verifier, third, b"m") == signatures.REPLAYED


def test_what_is_older_than_all_that_is_remembered_may_have_been_heard() -> None:
    verifier, signer = KEY.verifier(), AUTHORITY.worker(3).signer()
    before, heard = signer.sign(b"m"), [signer.sign(b"m") for _ in range(signatures.RECENT + 10)]
    for signature in heard:
        assert not reason(verifier, signature, b"m")
    assert {reason(verifier, one, b"m") for one in (before, *heard)} == {signatures.REPLAYED}


def test_nobody_is_told_of_late_messages() -> None:
    """They come over the old connection of a host that was cut off, after messages over its new one."""
    refusals = Refusals()
    refusals.add(signatures.LATE)
    assert refusals.news(1.0) == ""
    assert not refusals.counts


def test_a_clock_that_is_set_back_silences_nobody() -> None:
    times = iter([1000, 10, 20, 2000])
    signer = Signer("worker", 3, AUTHORITY.worker(3).token, lambda: next(times))
    verifier = KEY.verifier()
    assert not any(reason(verifier, signer.sign(b"m"), b"m") for _ in range(4))


def test_two_signers_of_one_process_share_their_stamps_when_its_clock_is_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker signs for the coordinator in one thread, and signs again after a reconnection with another signer."""
    verifier, credential = KEY.verifier(), AUTHORITY.worker(3)
    one, other = credential.signer(), credential.signer()
    assert not reason(verifier, one.sign(b"m"), b"m")
    monkeypatch.setattr(signatures.time, "time_ns", lambda: 1000)
    assert not any(reason(verifier, signer.sign(b"m"), b"m") for signer in (other, one, credential.signer(), other))


def test_a_process_whose_clock_is_hours_behind_is_heard() -> None:
    """It was started, or started again, after the machine's clock was set back."""
    verifier = KEY.verifier()
    assert not reason(verifier, AUTHORITY.agent().signer().sign(b"m"), b"m")
    again = AUTHORITY.agent()
    late = Signer(again.role, again.number, again.token, lambda: 1000)
    assert not any(reason(verifier, late.sign(b"m"), b"m") for _ in range(3))


def test_senders_do_not_disturb_each_other() -> None:
    verifier = KEY.verifier()
    ahead = Signer("worker", 1, AUTHORITY.worker(1).token, lambda: 1 << 62)
    assert not reason(verifier, ahead.sign(b"m"), b"m")
    assert not reason(verifier, AUTHORITY.worker(2).signer().sign(b"m"), b"m")
    assert not reason(verifier, AUTHORITY.owner().signer().sign(b"m"), b"m")


def test_a_member_cannot_be_another_one() -> None:
    mine = AUTHORITY.worker(3)
    for role, number in (("worker", 4), ("server", 3), ("owner", 3)):
        signature = Signer(role, number, mine.token).sign(b"m")
        assert reason(KEY.verifier(), signature, b"m") == signatures.WRONG_SIGNATURE
        signature = Signer(role, number, mine.peer_key).sign(b"m")
        assert reason(KEY.verifier(), signature, b"m") == signatures.WRONG_SIGNATURE
        assert role == "owner" or reason(AUTHORITY.server(0).verifier(), signature, b"m") == signatures.WRONG_SIGNATURE


def test_a_server_speaks_for_workers_to_servers_at_most() -> None:
    credential = AUTHORITY.server(0)
    for token in (credential.token, credential.peer_key, signatures.derive_token(credential.peer_key, "worker", 3)):
        assert reason(KEY.verifier(), Signer("worker", 3, token).sign(b"m"), b"m") == signatures.WRONG_SIGNATURE


def test_members_of_another_start_or_run_are_strangers_but_a_process_with_the_key_is_not() -> None:
    other, again = KeyAuthority(bytes(32), "first").run, KeyAuthority(KEY.secret, "second").run
    for one in (other.worker(3), other.agent(), other.owner(), KeyAuthority(bytes(32)).applicant()):
        assert reason(KEY.verifier(), one.signer().sign(b"m"), b"m") == signatures.WRONG_SIGNATURE
    for one in (again.worker(3), again.server(3), again.agent(), again.owner(), again.applicant()):
        signature = one.signer().sign(b"m")
        assert reason(KEY.verifier(), signature, b"m") == signatures.OTHER_START
        assert reason(KEY.verifier(), signature, b"n") == signatures.WRONG_SIGNATURE
        renamed = msgspec.structs.replace(one, start="third").signer().sign(b"m")  # only the key's owner has its token
        assert reason(KEY.verifier(), renamed, b"m") == signatures.WRONG_SIGNATURE
    assert not reason(KEY.verifier(), KeyAuthority(KEY.secret).applicant().signer().sign(b"m"), b"m")
    assert again.owner().coordinator_key == AUTHORITY.worker(3).coordinator_key != other.worker(3).coordinator_key
    assert again.worker(3).servers_key != AUTHORITY.worker(3).servers_key


def test_nothing_of_one_run_opens_another_run_with_the_same_key() -> None:
    """Also if each of its secrets is taken for a key's or a run's secret."""
    mine, other = KeyAuthority(KEY.secret, "other").run, KEY
    had = [mine.secret, mine.coordinator_key, *(mine.worker(3).token, mine.server(3).peer_key, mine.agent().token)]
    roles = (signatures.OWNER, signatures.AGENT, signatures.KEY_HOLDER, signatures.WORKER, signatures.SERVER)
    for secret in had:
        posing = KeyAuthority(secret)
        assert posing.keys() != other.keys(), "it could pose as the coordinator"
        for start in ("first", "other", ""):
            run = Authority(secret, mine.coordinator_key, start)
            for one in (posing.applicant(), *(made for a in (run, posing.of_start(start)) for made in of_each_role(a))):
                signature = one.signer().sign(b"m")
                assert reason(other.verifier(), signature, b"m") in (signatures.WRONG_SIGNATURE, signatures.OTHER_START)
        for role in roles:
            signature = Signer(role, 3, secret, start="first").sign(b"m")
            assert reason(other.verifier(), signature, b"m") == signatures.WRONG_SIGNATURE


def of_each_role(authority: Authority) -> list[Credential]:
    return [authority.owner(), authority.agent(), authority.worker(3), authority.server(3)]


def test_a_flood_is_cut_and_others_are_heard() -> None:
    verifier = Verifier({"worker": b"k"}, burst=10, per_s=5)
    loud, quiet = (Signer("worker", n, signatures.derive_token(b"k", "worker", n)) for n in (1, 2))
    assert [reason(verifier, loud.sign(b"m"), b"m") for _ in range(12)] == [""] * 10 + [signatures.TOO_MANY] * 2
    assert not reason(verifier, quiet.sign(b"m"), b"m")
    assert [reason(verifier, loud.sign(b"m"), b"m", now=1.0) for _ in range(6)] == [""] * 5 + [signatures.TOO_MANY]


def test_only_so_many_are_remembered_and_those_forgotten_cannot_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signatures, "REMEMBERED", 100)
    verifier = KEY.verifier()
    first = AUTHORITY.owner().signer().sign(b"m")
    assert not reason(verifier, first, b"m")
    for _ in range(150):
        assert not reason(verifier, AUTHORITY.owner().signer().sign(b"m"), b"m")
    for number in range(1000):
        assert reason(verifier, Signer("worker", number, b"none").sign(b"m"), b"m") == signatures.WRONG_SIGNATURE
    assert len(verifier._known) == 100
    assert reason(verifier, first, b"m") == signatures.REPLAYED


def test_the_sender_that_was_silent_longest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent speaks all the time. If it were forgotten, all later senders would need stamps above its last one."""
    monkeypatch.setattr(signatures, "REMEMBERED", 100)
    verifier, agent = KEY.verifier(), AUTHORITY.agent().signer()
    for _ in range(150):
        assert not reason(verifier, AUTHORITY.owner().signer().sign(b"m"), b"m")
        assert not reason(verifier, agent.sign(b"m"), b"m")
    newest_forgotten = verifier._floor
    owner = AUTHORITY.owner()
    late = Signer(owner.role, owner.number, owner.token, lambda: newest_forgotten + 1)
    assert not reason(verifier, late.sign(b"m"), b"m")
    assert len(verifier._known) == 100


def test_a_badge_travels_and_does_not_show_what_it_holds() -> None:
    credential = AUTHORITY.worker(3)
    assert msgspec.convert(msgspec.to_builtins(credential), Credential) == credential
    for shown in (repr(credential), str(credential), repr(AUTHORITY), repr(KEY)):
        for secret in (credential.token, credential.peer_key, AUTHORITY.secret, KEY.secret):
            assert repr(secret) not in shown
            assert secret.hex() not in shown


def test_refusals_are_said_now_and_then() -> None:
    refusals = Refusals()
    assert refusals.news(0.0) == ""
    refusals.add("malformed")
    assert refusals.news(1.0) == "refused 1 message: 1 malformed"
    for _ in range(1000):
        refusals.add("replayed")
        assert refusals.news(2.0) == ""
    assert refusals.news(12.0) == "refused 1001 messages: 1000 replayed, 1 malformed"
    assert refusals.news(30.0) == ""


def test_a_claim_is_a_pair() -> None:
    assert Sender("worker", 3) == ("worker", 3)
