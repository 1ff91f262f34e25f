"""Words in shared memory, and waiting for another member to change one of them.

A word has one writer. Plain stores suffice between x86 processes (stores are seen in program order); other instruction
sets use torch groups. A waiter spins a little, then sleeps in the kernel on the other member's *bell* (a futex), so
that more workers than cores cost no time slices. Every wait can be aborted and notices an abort within moments.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Callable

_LINE = 64  # one writer per cache line
_SYS_FUTEX = {"x86_64": 202}.get(platform.machine(), -1)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_SPINS = 4000  # half a millisecond, about what waking a sleeper costs in a virtual machine, several times a step
_SPINS_CROWDED = 100  # where members outnumber the cores, the one that is waited for needs the core
_EVERYBODY = 2**31 - 1

supported = _SYS_FUTEX >= 0

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_NAP = ctypes.byref(_Timespec(0, 20_000_000))  # how soon a sleeper looks for an abort


class Aborted(Exception):
    """The collective in flight was given up: the membership changes or the run ends."""


class Abort:
    """A flag that ends every wait of one generation. Set by the control thread, read by the training thread. A new
    generation has a new flag: clearing an old one could lose the next abort."""

    def __init__(self) -> None:
        self.reason = ""
        self.wake: Callable[[], None] = lambda: None
        """Rouses whoever sleeps in a wait of this generation."""
        self.left_behind = False
        """Whoever waits in this generation was not to be roused: somebody else has gone on in its place."""
        self.leave: Callable[[], None] | None = None
        """Tells that somebody else, if there can be one; see worker/successor.py."""

    def set(self, reason: str) -> None:
        self.reason = reason or "aborted"
        self.wake()

    def check(self) -> None:
        if self.reason:
            raise Aborted(self.reason)


def row_bytes(words: int) -> int:
    """Bytes of one member's row: its bell and `words` words, in cache lines of their own."""
    return -(-(words + 1) * 4 // _LINE) * _LINE


class Words:
    """A table of 32-bit words: one row per member, written by that member alone, read by all."""

    def __init__(self, memory: mmap.mmap, offset_bytes: int, members: int, words: int, me: int, abort: Abort) -> None:
        self._row = row_bytes(words) // 4
        self._cells = (ctypes.c_uint32 * (self._row * members)).from_buffer(memory, offset_bytes)
        self._address = ctypes.addressof(self._cells)
        self._members = members
        self._me = me
        self._abort = abort
        abort.wake = self.wake_sleepers
        self.waiting = False
        """Whether I wait for somebody at this moment."""
        self._spins = _SPINS if members <= len(os.sched_getaffinity(0)) else _SPINS_CROWDED

    def set(self, word: int, value: int) -> None:
        """Publish a value of mine, after everything I wrote before it."""
        self._cells[self._me * self._row + 1 + word] = value

    def get(self, member: int, word: int) -> int:
        return self._cells[member * self._row + 1 + word]

    def ring(self) -> None:
        """Wake whoever sleeps until one of my words changes."""
        bell = self._me * self._row
        self._cells[bell] = (self._cells[bell] + 1) & 0xFFFFFFFF
        _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(self._address + bell * 4), _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def wake_sleepers(self) -> None:
        """Wake everybody who sleeps in this table, so that they look for an abort now and not after their nap."""
        for bell in range(0, self._row * self._members, self._row):
            _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(self._address + bell * 4), _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def wait(self, member: int, word: int, enough: Callable[[int], bool]) -> None:
        """Return when that member's word satisfies `enough`; raise Aborted if the wait is given up."""
        cells, cell, bell = self._cells, member * self._row + 1 + word, member * self._row
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

    def reached(self, word: int, value: int) -> bool:
        """Whether every member has announced that value."""
        return all(self._cells[member * self._row + 1 + word] >= value for member in range(self._members))

    def barrier(self, word: int, value: int) -> None:
        """Announce `value` in that word and wait until every member has announced it (values only grow)."""
        self.announce(word, value)
        self.await_all(word, value)

    def announce(self, word: int, value: int) -> None:
        """Also after an abort: what I have done stays done, and those who take the step over look for it here."""
        self.set(word, value)
        self.ring()

    def await_all(self, word: int, value: int) -> None:
        for member in range(self._members):
            if member != self._me and self._cells[member * self._row + 1 + word] < value:
                self.waiting = True
                self.wait(member, word, lambda seen: seen >= value)
        self.waiting = False
