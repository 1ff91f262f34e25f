"""The segments: the same memory under the same name, for as long as it lives, whoever dies meanwhile."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from distbelief.errors import DistBeliefError, NotEnoughMemory
from distbelief.transport.shm.segment import SegmentClient
from distbelief.transport.shm.segmentserver import SegmentServer
from tests.support.stage import Stage

MEMBER = "tests.support.exchange.sharing"


@contextmanager
def connected(segments: SegmentServer) -> Iterator[SegmentClient]:
    """A client whose requests a thread answers until it has gone."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def serve() -> None:
        try:
            while True:
                segments.answer(ours)
        except EOFError:
            ours.close()

    server = threading.Thread(target=serve)
    server.start()
    try:
        yield SegmentClient(theirs)
    finally:
        theirs.close()
        server.join()


@pytest.fixture
def segments() -> Iterator[SegmentServer]:
    it = SegmentServer()
    yield it
    it.close()


def test_two_clients_get_the_same_memory_under_one_name(segments: SegmentServer) -> None:
    with connected(segments) as one, connected(segments) as two:
        first, second = one.segment("state", 4096), two.segment("state", 4096)
        other = two.segment("other", 4096)
        first.tensor(torch.int32, 0, 1024).fill_(5)
        assert second.tensor(torch.int32, 0, 1024).tolist() == [5] * 1024
        assert not any(other.view(0, 4096))


def test_who_can_do_without_it_does_not_wait_for_a_keeper_that_is_silent(segments: SegmentServer) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        client = SegmentClient(theirs)
        assert client.segment_soon("slot", 4096) is None
        assert client.segment_soon("slot", 4096) is None
        assert client.segment_soon("too large", 1 << 60) is None
        for _ in range(2):  # each was asked for once
            segments.answer(ours)
        with pytest.raises(NotEnoughMemory):
            client.segment_soon("too large", 1 << 60)
        late = client.segment_soon("slot", 4096)
        assert late is not None
        client.segment_soon("another", 4096)
        server = threading.Thread(target=lambda: [segments.answer(ours) for _ in range(2)])
        server.start()
        same = client.segment("slot", 4096)  # whose answer comes after that of the other
        server.join()
        same.tensor(torch.int32, 0, 1024).fill_(5)
        assert late.tensor(torch.int32, 0, 1024).tolist() == [5] * 1024
        assert client.segment_soon("another", 4096) is not None


def test_members_write_parts_of_one_segment(stage: Stage) -> None:
    seen = stage.play(MEMBER, "fill_my_part", [{"rank": rank, "size": 4} for rank in range(4)])
    assert seen == [[1.0, 2.0, 3.0, 4.0]] * 4


def test_a_client_that_disagrees_on_the_size_is_told_both(segments: SegmentServer) -> None:
    with connected(segments) as one, connected(segments) as two:
        one.segment("state", 4096)
        with pytest.raises(DistBeliefError, match=r"'state' has 4096 bytes, not 8192.*disagree") as caught:
            two.segment("state", 8192)
        assert not isinstance(caught.value, NotEnoughMemory)  # people would look for memory in vain
        assert two.segment("state", 4096).size_bytes == 4096


def test_an_unknown_name_without_a_size_is_an_error(segments: SegmentServer) -> None:
    with connected(segments) as client:
        with pytest.raises(DistBeliefError, match="no shared segment 'job'") as caught:
            client.segment("job")
        assert not isinstance(caught.value, NotEnoughMemory)


def test_content_that_was_put_is_found_by_name_alone(segments: SegmentServer) -> None:
    content = os.urandom(3 << 20)
    segments.put("job", content)
    with connected(segments) as client:
        segment = client.segment("job")
        assert segment.size_bytes == len(content)
        assert bytes(segment.view(0, len(content))) == content


def test_a_request_for_more_than_there_is_reaches_the_client_as_such(segments: SegmentServer) -> None:
    with connected(segments) as client:
        with pytest.raises(NotEnoughMemory, match=r"huge.*1048576.00 GiB\D+[\d.]+ GiB") as caught:
            client.segment("huge", 1 << 50)
        assert caught.value.hint
        assert client.segment("small", 64).size_bytes == 64


def test_a_client_that_goes_away_ends_its_own_service_only(segments: SegmentServer) -> None:
    with connected(segments) as stays:
        with connected(segments) as goes:
            goes.segment("state", 64).tensor(torch.uint8, 0, 64).fill_(3)
        gc.collect()
        assert bytes(stays.segment("state", 64).view(0, 64)) == b"\3" * 64


def test_what_a_killed_member_wrote_is_still_there(stage: Stage) -> None:
    outcomes = stage.outcomes(MEMBER, "write_then_die_or_read", [{"die": die} for die in (True, False, False)])
    assert [outcome.status for outcome in outcomes] == [-signal.SIGKILL, 0, 0]
    assert [outcome.value for outcome in outcomes[1:]] == [[7.0, 7.0]] * 2


def test_dropped_segments_stay_with_those_who_map_them(segments: SegmentServer) -> None:
    with connected(segments) as client:
        old = client.segment("generation 1/slot", 64)
        state = client.segment("state", 64)
        old.tensor(torch.uint8, 0, 64).fill_(1)
        state.tensor(torch.uint8, 0, 64).fill_(2)
        segments.drop_before("generation 2")
        assert bytes(old.view(0, 64)) == b"\1" * 64
        assert not any(client.segment("generation 1/slot", 64).view(0, 64))  # a new one under the old name
        assert bytes(client.segment("state", 64).view(0, 64)) == b"\2" * 64


def test_a_closed_keeper_has_given_its_descriptors_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    segments = SegmentServer()
    segments.put("job", b"content")
    with connected(segments) as client:
        for number in range(5):
            client.segment(f"slot {number}", 4096)
    segments.close()
    del client
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
