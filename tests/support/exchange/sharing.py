"""What single members do in the tests of this folder. Runs in processes of the stage."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time

import numpy as np
import torch

from distbelief.errors import NotEnoughMemory
from distbelief.transport.abort import Abort, Aborted
from distbelief.transport.shm.futexflags import FutexFlags, flag_row_bytes
from distbelief.transport.shm.memfd import allocate
from distbelief.transport.shm.segment import SegmentClient


def write_then_die(segments: SegmentClient) -> None:
    segments.segment("legacy", 4096).tensor(torch.float32, 0, 1024).fill_(7.0)
    os.kill(os.getpid(), signal.SIGKILL)


def read_the_legacy(segments: SegmentClient) -> list[float]:
    values = segments.segment("legacy", 4096).tensor(torch.float32, 0, 1024)
    while values[-1] != 7.0:
        time.sleep(0.001)
    return [float(values.min()), float(values.max())]


def fill_my_part(segments: SegmentClient, rank: int, size: int) -> list[float]:
    """Everybody writes one part of the same memory, waits for the others and reads it all."""
    values = segments.segment("common", 8 * size).tensor(torch.float64, 0, size)
    values[rank] = rank + 1
    while not values.all():
        time.sleep(0.001)
    return [float(value) for value in values]


def allocate_under_a_limit(segments: SegmentClient) -> tuple[str, int]:
    """The kernel refuses the pages although enough memory seems free. (message, descriptors left behind)"""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    before = len(os.listdir("/proc/self/fd"))
    try:
        allocate(1 << 21, "too much")
    except NotEnoughMemory as error:
        return error.message, len(os.listdir("/proc/self/fd")) - before
    return "", 0


def _flags(segments: SegmentClient, rank: int, size: int, flags: int, abort: Abort) -> tuple[FutexFlags, np.ndarray]:
    """The flags of a group, and behind them one number per member."""
    table = flag_row_bytes(flags) * size
    segment = segments.segment("words", table + 8 * size)
    return FutexFlags(segment.buffer, 0, size, flags, rank, abort), np.frombuffer(segment.buffer, np.int64, size, table)


def meet_often(segments: SegmentClient, rank: int, size: int, rounds: int) -> int:
    """At each meeting everybody's number of this round is there, and nobody's of the next one."""
    flags, numbers = _flags(segments, rank, size, 2, Abort())
    for number in range(1, rounds + 1):
        numbers[rank] = number
        flags.barrier(0, number)
        assert numbers.tolist() == [number] * size, f"round {number}: {numbers.tolist()}"
        flags.barrier(1, number)
    return rounds


def meet_somebody_who_never_comes(segments: SegmentClient, rank: int, size: int, absent: int) -> str:
    abort = Abort()
    flags, _ = _flags(segments, rank, size, 1, abort)
    if rank == absent:
        return "absent"
    threading.Timer(0.05, abort.set, ["the members change"]).start()
    try:
        flags.barrier(0, 1)
    except Aborted as error:
        return str(error)
    return "nobody was missed"


def hear_a_quiet_word(segments: SegmentClient, rank: int) -> int:
    """Member 0 sets a word and rings no bell, long after member 1 went to sleep: it is seen all the same."""
    flags, _ = _flags(segments, rank, 2, 3, Abort())
    if rank == 0:
        time.sleep(0.1)
        flags.set(2, 41)
    else:
        flags.wait(0, 2, lambda seen: seen > 40)
    return flags.get(0, 2)


def write_then_die_or_read(segments: SegmentClient, die: bool) -> list[float]:
    if die:
        write_then_die(segments)
    return read_the_legacy(segments)
