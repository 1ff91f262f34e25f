"""How the members of one host wait for each other, and how they notice at once that one of them has died.

`FutexFlags` is a table of 32-bit flags in shared memory. A flag has one writer. Plain stores suffice between x86
processes (stores are seen in program order); other instruction sets use torch groups. A waiting member spins for a
moment, then sleeps in the kernel on the other member's *bell* (a futex), so that more workers than cores cost no time
slices. Every wait can be aborted and notices an abort within milliseconds.

`ThreadLiveness` is a robust mutex in shared memory, which the training thread holds while it works. When that thread
dies, for whatever reason, the kernel marks the mutex and wakes its watchers before it takes the process's memory apart.
The end of the process is reported only after that; 20 to 50 ms later were measured. The mutex protects no data.

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
from typing import Literal

from distbelief.transport.abort import Abort

LIVENESS_BYTES = 64  # a pthread_mutex_t has 40 on x86-64
_LINE = 64  # one writer per cache line
_SYS_FUTEX = {"x86_64": 202}.get(platform.machine(), -1)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ROBUST, _SHARED = 1, 1
_SPINS = 4000  # half a millisecond, about what waking a sleeper costs in a virtual machine, several times a step
_SPINS_CROWDED = 100  # where members outnumber the cores, the member that is waited for needs the core
_EVERYBODY = 2**31 - 1

supported = _SYS_FUTEX >= 0

_libc = ctypes.CDLL(None, use_errno=True)
_held: set[ThreadLiveness] = set()
"""glibc links the mutexes that a thread holds into a list: their memory must be mapped for as long as they are held."""


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_NAP = ctypes.byref(_Timespec(0, 20_000_000))  # how soon a sleeper looks for an abort


def flag_row_bytes(flags: int) -> int:
    """Bytes of one member's row: its bell and its flags, in cache lines of their own."""
    return -(-(flags + 1) * 4 // _LINE) * _LINE


class FutexFlags:
    """A table of 32-bit flags: one row per member, written by that member alone, read by all."""

    def __init__(self, memory: mmap.mmap, offset_bytes: int, members: int, flags: int, me: int, abort: Abort) -> None:
        self._row = flag_row_bytes(flags) // 4
        self._cells = (ctypes.c_uint32 * (self._row * members)).from_buffer(memory, offset_bytes)
        self._address = ctypes.addressof(self._cells)
        self._members = members
        self._me = me
        self._abort = abort
        abort.wake = self.wake_sleepers
        self.waiting = False
        """Whether this member waits for another at this moment."""
        self._spins = _SPINS if members <= len(os.sched_getaffinity(0)) else _SPINS_CROWDED

    def set(self, flag: int, value: int) -> None:
        """Publish a value of this member, after everything that it wrote before."""
        self._cells[self._me * self._row + 1 + flag] = value

    def get(self, member: int, flag: int) -> int:
        return self._cells[member * self._row + 1 + flag]

    def ring(self) -> None:
        """Wake the members that sleep until one of this member's flags changes."""
        bell = self._me * self._row
        self._cells[bell] = (self._cells[bell] + 1) & 0xFFFFFFFF
        _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(self._address + bell * 4), _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def wake_sleepers(self) -> None:
        """Wake all members that sleep on this table, so that they look for an abort now and not after their nap."""
        for bell in range(0, self._row * self._members, self._row):
            _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(self._address + bell * 4), _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def wait(self, member: int, flag: int, enough: Callable[[int], bool]) -> None:
        """Return when that member's flag satisfies `enough`; raise Aborted if the wait is given up."""
        cells, cell, bell = self._cells, member * self._row + 1 + flag, member * self._row
        spins = 0
        while not enough(cells[cell]):
            spins += 1
            if spins < self._spins:
                continue
            self._abort.check()
            heard = cells[bell]
            if enough(cells[cell]):
                return
            _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(self._address + bell * 4), _FUTEX_WAIT, heard, _NAP, None, 0)

    def reached(self, flag: int, value: int) -> bool:
        """Whether every member has announced that value."""
        return all(self._cells[member * self._row + 1 + flag] >= value for member in range(self._members))

    def barrier(self, flag: int, value: int) -> None:
        """Announce `value` in that flag and wait until every member has announced it (values only grow)."""
        self.announce(flag, value)
        self.await_all(flag, value)

    def announce(self, flag: int, value: int) -> None:
        """Also after an abort: finished work stays finished, and the members that take the step over look for it
        here."""
        self.set(flag, value)
        self.ring()

    def await_all(self, flag: int, value: int) -> None:
        for member in range(self._members):
            if member != self._me and self._cells[member * self._row + 1 + flag] < value:
                self.waiting = True
                self.wait(member, flag, lambda seen: seen >= value)
        self.waiting = False


class ThreadLiveness:
    """Whether one thread of another process is alive: a robust mutex at a place in shared memory."""

    def __init__(self, memory: mmap.mmap, offset_bytes: int) -> None:
        self._cell = (ctypes.c_char * LIVENESS_BYTES).from_buffer(memory, offset_bytes)

    def begin(self) -> None:
        """The calling thread is alive from now on. Other threads may watch it only after this has returned."""
        attributes = ctypes.create_string_buffer(16)
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, _SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(_libc.pthread_mutex_init(self._cell, attributes))
        _check(_libc.pthread_mutex_lock(self._cell))
        _held.add(self)

    def end(self) -> None:
        """The thread leaves this generation alive. Call it from the thread that called `begin`."""
        if self in _held:
            _held.discard(self)
            _check(_libc.pthread_mutex_unlock(self._cell))

    def watch(self, timeout_s: float) -> Literal["alive", "ended", "dead"]:
        """Wait until the thread ends or dies, at most `timeout_s`."""
        until = time.time() + timeout_s
        deadline = _Timespec(int(until), int(until % 1 * 1e9))
        status = _libc.pthread_mutex_timedlock(self._cell, ctypes.byref(deadline))
        if status == errno.ETIMEDOUT:
            return "alive"
        if status in (0, errno.EOWNERDEAD):
            _libc.pthread_mutex_unlock(self._cell)  # the other watchers learn that it cannot be recovered
        return "ended" if status == 0 else "dead"


def _check(status: int) -> None:
    if status:
        raise OSError(status, "a robust mutex cannot be used here")
