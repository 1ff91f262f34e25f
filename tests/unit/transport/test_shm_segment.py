"""Segments: memory without a name, handed between processes, refused in words, and gone when nobody maps it."""

from __future__ import annotations

import gc
import os
import re
import socket
from pathlib import Path

import psutil
import pytest
import torch

from distbelief.errors import NotEnoughMemory
from distbelief.transport.shm.memfd import allocate, free_memory_bytes, receive_message, send_message
from distbelief.transport.shm.segment import Segment
from tests.support.stage import Stage

MEMBER = "tests.support.exchange.sharing"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def made(size_bytes: int, label: str = "made for a test") -> Segment:
    return Segment(allocate(size_bytes, label), size_bytes)


def test_a_new_segment_is_zero_and_its_views_share_it() -> None:
    segment = made(4096)
    assert not any(segment.view(0, 4096))
    segment.tensor(torch.float32, 64, 2).copy_(torch.tensor([1.0, -2.0]))
    segment.tensor(torch.bfloat16, 128, 1).fill_(1.0)
    assert bytes(segment.view(64, 8)) == b"\x00\x00\x80\x3f\x00\x00\x00\xc0"
    assert bytes(segment.view(128, 2)) == b"\x80\x3f"
    segment.buffer[4088:4096] = (7).to_bytes(8, "little")
    assert segment.tensor(torch.int64, 4088, 1).item() == 7


@pytest.mark.parametrize("make", [made, Segment.private])
def test_a_segment_may_be_empty(make: type[Segment]) -> None:
    segment = make(0)
    assert segment.size_bytes == 0
    assert segment.tensor(torch.float32, 0, 0).numel() == 0


def test_a_tensor_keeps_the_memory_of_a_segment_that_is_let_go() -> None:
    segment = made(1 << 20, "let go")
    tensor = segment.tensor(torch.float32, 0, 1 << 18)
    del segment
    gc.collect()
    assert tensor.fill_(2.0).sum() == 2.0 * (1 << 18)


def test_another_process_maps_the_same_memory() -> None:
    segment = made(4096)
    pid = os.fork()
    if pid == 0:
        Segment(os.dup(segment.fd), 4096).buffer[100:103] = b"abc"
        os._exit(0)
    os.waitpid(pid, 0)
    assert bytes(segment.view(99, 5)) == b"\0abc\0"


def test_a_descriptor_travels_over_a_socket() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    original = made(64)
    send_message(here, {"size_bytes": 64, "name": "x"}, [original.fd])
    send_message(here, {"second": True})
    header, (fd,) = receive_message(there)
    assert header == {"size_bytes": 64, "name": "x"}
    assert fd != original.fd
    assert not os.get_inheritable(fd)
    assert receive_message(there) == ({"second": True}, [])
    copy = Segment(fd, 64)
    copy.tensor(torch.int32, 0, 16).fill_(9)
    assert original.tensor(torch.int32, 0, 16).tolist() == [9] * 16
    here.close()
    with pytest.raises(EOFError):
        receive_message(there)


def test_a_header_over_the_limit_is_refused_before_it_is_sent() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with pytest.raises(ValueError, match="over the limit"):
        send_message(here, {"name": "x" * (1 << 16)})
    here.close()
    there.close()


def test_too_large_a_segment_is_refused_with_both_figures_and_leaves_nothing() -> None:
    before = descriptors()
    with pytest.raises(NotEnoughMemory) as caught:
        made(1 << 50, "generation 1/slot/0.0")
    assert "generation 1/slot/0.0" in caught.value.message
    figures = re.search(r"([\d.]+) GiB\D+([\d.]+) GiB", caught.value.message)
    assert figures
    assert float(figures[1]) == 2.0**20
    assert 0 <= float(figures[2]) <= psutil.virtual_memory().total / 2**30
    assert caught.value.hint
    assert descriptors() == before


def test_a_refusal_of_the_kernel_is_told_in_the_same_words(stage: Stage) -> None:
    [(message, left)] = stage.play(MEMBER, "allocate_under_a_limit", [{}])
    assert "too much" in message
    assert "GiB" in message
    assert left == 0


def test_free_memory_is_what_the_machine_has_at_most() -> None:
    assert free_memory_bytes() < psutil.virtual_memory().total


def test_pages_are_there_when_a_segment_is_made() -> None:
    fd = allocate(1 << 20, "pages")
    assert os.fstat(fd).st_blocks * 512 >= 1 << 20
    os.close(fd)


def test_nothing_is_left_of_a_segment_that_nobody_uses() -> None:
    before = descriptors()
    segment = made(1 << 20, "distbelief-leftover-test")
    tensor = segment.tensor(torch.float32, 0, 16).fill_(1.0)
    assert "distbelief-leftover-test" in Path("/proc/self/maps").read_text()
    assert not [name for name in os.listdir("/dev/shm") if "leftover-test" in name]
    del segment, tensor
    gc.collect()
    assert "distbelief-leftover-test" not in Path("/proc/self/maps").read_text()
    assert descriptors() == before
