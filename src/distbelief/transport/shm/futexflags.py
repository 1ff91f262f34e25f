"""Futex flags and thread liveness: waiting between the members of one host, and immediate detection of deaths.

`FutexFlags` is a table of 32-bit flags in shared memory. A flag has one writer. Plain stores suffice between x86
processes (stores are seen in program order); on other processors members exchange over gloo. A waiting member spins for
a moment, then sleeps in the kernel on the other member's futex, so that it frees the core where workers outnumber
cores. Every wait can be aborted, and notices an abort within milliseconds.

`ThreadLiveness` is a robust mutex in shared memory, which the training thread holds while it works. When that thread
dies, for whatever reason, the kernel marks the mutex and wakes its watchers before it frees the process's memory. The
process's exit is reported only after that, 20 to 50 ms later (measured). The mutex protects no data.

Torch-free.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import time
from collections.abc import Callable
from typing import Any, Literal

from distbelief.instrument import Instrument
from distbelief.transport.abort import Abort

LIVENESS_BYTES = 64  # a pthread_mutex_t has 40 on x86-64
_LINE = 64  # one writer per cache line
_SYS_FUTEX = {"x86_64": 202}.get(platform.machine(), -1)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ROBUST, _SHARED = 1, 1
_SPINS = 4000  # half a millisecond: as long as waking a sleeper takes in a virtual machine
_SPINS_CROWDED = 100  # with more members than cores, the awaited member needs the core
_EVERYBODY = 2**31 - 1

TIMED = (Instrument("wait", __name__, "FutexFlags", ("await_all",)),)

supported = _SYS_FUTEX >= 0

_libc = ctypes.CDLL(None, use_errno=True)
_clock_lock = getattr(_libc, "pthread_mutex_clocklock", None)  # glibc before 2.30 has none
_LOOK_EVERY_S = 0.01
_held: set[ThreadLiveness] = set()
"""glibc links the mutexes that a thread holds into a list, so their memory must stay mapped while they are held."""


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_NAP = ctypes.byref(_Timespec(0, 20_000_000))  # a sleeping member checks for an abort this often


def flag_row_bytes(flags: int) -> int:
    """The size of one member's row: its futex and its flags, in separate cache lines."""
    return -(-(flags + 1) * 4 // _LINE) * _LINE


class FutexFlags:
    """A table of 32-bit flags: one row per member, written by that member, read by all."""

    def __init__(self, memory: mmap.mmap, offset_bytes: int, members: int, flags: int, me: int, abort: Abort) -> None:
        self._row = flag_row_bytes(flags) // 4
        self._cells = (ctypes.c_uint32 * (self._row * members)).from_buffer(memory, offset_bytes)
        self._address = ctypes.addressof(self._cells)
        self._members = members
        self._me = me
        self._abort = abort
        abort.wake = self.wake_sleepers
        self.waiting = False
        """Whether this member waits for another member now."""
        self._spins = _SPINS if members <= len(os.sched_getaffinity(0)) else _SPINS_CROWDED

    def set(self, flag: int, value: int) -> None:
        """Publish a value of this member, after all of its earlier writes."""
        self._cells[self._me * self._row + 1 + flag] = value

    def get(self, member: int, flag: int) -> int:
        return self._cells[member * self._row + 1 + flag]

    def wake(self) -> None:
        """Wake the members that wait for a change of this member's flags."""
        futex = self._me * self._row
        self._cells[futex] = (self._cells[futex] + 1) & 0xFFFFFFFF
        self._futex(futex, _FUTEX_WAKE, _EVERYBODY, None)

    def wake_sleepers(self) -> None:
        """Wake all members that sleep on this table, so that they notice an abort at once."""
        for futex in range(0, self._row * self._members, self._row):
            self._futex(futex, _FUTEX_WAKE, _EVERYBODY, None)

    def _futex(self, cell: int, operation: int, value: int, timeout: Any) -> None:
        _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(self._address + cell * 4), operation, value, timeout, None, 0)

    def wait(self, member: int, flag: int, enough: Callable[[int], bool]) -> None:
        """Wait until the member's flag satisfies `enough`. Raises Aborted."""
        cells, cell, futex = self._cells, member * self._row + 1 + flag, member * self._row
        spins = 0
        while not enough(cells[cell]):
            spins += 1
            if spins < self._spins:
                continue
            self._abort.check()
            seen = cells[futex]
            if enough(cells[cell]):
                return
            self._futex(futex, _FUTEX_WAIT, seen, _NAP)

    def reached(self, flag: int, value: int) -> bool:
        """Whether every member has announced at least this value."""
        return all(self._cells[member * self._row + 1 + flag] >= value for member in range(self._members))

    def barrier(self, flag: int, value: int) -> None:
        """Announce `value` in the flag and wait until every member has announced it. Values only grow."""
        self.announce(flag, value)
        self.await_all(flag, value)

    def announce(self, flag: int, value: int) -> None:
        """Set the flag also after an abort: finished work stays valid, and members that take the step over read it
        here."""
        self.set(flag, value)
        self.wake()

    def await_all(self, flag: int, value: int) -> None:
        for member in range(self._members):
            if member != self._me and self._cells[member * self._row + 1 + flag] < value:
                self.waiting = True
                self.wait(member, flag, lambda seen: seen >= value)
        self.waiting = False


class ThreadLiveness:
    """Whether one thread of another process is alive: a robust mutex in shared memory."""

    def __init__(self, memory: mmap.mmap, offset_bytes: int) -> None:
        self._cell = (ctypes.c_char * LIVENESS_BYTES).from_buffer(memory, offset_bytes)

    def begin(self) -> None:
        """The calling thread becomes watchable. Other threads may watch only after this returns."""
        attributes = ctypes.create_string_buffer(16)
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, _SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(_libc.pthread_mutex_init(self._cell, attributes))
        _check(_libc.pthread_mutex_lock(self._cell))
        _held.add(self)

    def end(self) -> None:
        """The thread leaves the generation alive. Call it from the thread that called `begin`."""
        if self in _held:
            _held.discard(self)
            _check(_libc.pthread_mutex_unlock(self._cell))

    def watch(self, timeout_s: float) -> Literal["alive", "ended", "dead"]:
        """Wait until the thread ends or dies, for at most `timeout_s`."""
        status = _lock_within(self._cell, timeout_s)
        if status == errno.ETIMEDOUT:
            return "alive"
        if status in (0, errno.EOWNERDEAD):
            _libc.pthread_mutex_unlock(self._cell)  # tells the other watchers that the mutex is not recoverable
        return "ended" if status == 0 else "dead"


def _lock_within(mutex: Any, timeout_s: float) -> int:
    until = time.monotonic() + timeout_s
    if _clock_lock is not None:
        deadline = ctypes.byref(_Timespec(int(until), int(until % 1 * 1e9)))
        return int(_clock_lock(mutex, time.CLOCK_MONOTONIC, deadline))
    # pthread_mutex_timedlock waits by the clock that can be set: by hours too long after it was set back.
    while (status := int(_libc.pthread_mutex_trylock(mutex))) == errno.EBUSY and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)
    return errno.ETIMEDOUT if status == errno.EBUSY else status


def _check(status: int) -> None:
    if status:
        raise OSError(status, "a robust mutex cannot be used here")
