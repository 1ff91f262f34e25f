"""Signals to the processes of our own run: stop, go on, slow down, end. It never decides whom or when.

A process is held by a pidfd from the moment its number is first read, so that no signal can ever reach another process
that was given the same number; and it is only held if it descends from this process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time

import psutil

RUN_SLICE_S = 0.004


class Victim:
    """One living process. Holds are counted: it runs again when everybody who stopped it has let go."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid = pid
        self._fd = fd
        self._holds = 0
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        """A process that nobody has reaped yet counts as gone: it does nothing any more."""
        with self._lock:
            return self._fd >= 0 and not select.select([self._fd], [], [], 0)[0]

    def kill(self) -> bool:
        with self._lock:
            return self._send(signal.SIGKILL)

    def ask_to_leave(self) -> bool:
        with self._lock:
            return self._send(signal.SIGTERM)

    def hold(self) -> None:
        with self._lock:
            self._holds += 1
            if self._holds == 1:
                self._send(signal.SIGSTOP)

    def let_go(self) -> None:
        with self._lock:
            self._holds -= 1
            if self._holds == 0:
                self._send(signal.SIGCONT)

    def close(self) -> None:
        """Let it run and forget it; it may be called twice."""
        with self._lock:
            if self._fd >= 0:
                if self._holds:
                    self._send(signal.SIGCONT)
                os.close(self._fd)
                self._fd = -1

    def _send(self, number: signal.Signals) -> bool:
        if self._fd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            return False
        return True


def catch(pid: int) -> Victim | None:
    """Take hold of a process of our own; None when it is gone or is not ours."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    # The number cannot change hands between these two lines without the descriptor seeing its process end.
    victim = Victim(pid, fd)
    ours = False
    with contextlib.suppress(psutil.Error):
        ours = any(parent.pid == os.getpid() for parent in psutil.Process(pid).parents())
    if not ours or not victim.alive:
        victim.close()
        return None
    return victim


class Throttle:
    """Let a process run for 1/factor of the time, in slices of a few milliseconds, until `end`."""

    def __init__(self, victim: Victim, factor: float) -> None:
        self._victim = victim
        self._factor = factor
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"slow {victim.pid}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        running_since = time.monotonic()
        while self._victim.alive and not self._over.is_set():
            self._over.wait(RUN_SLICE_S)
            self._victim.hold()
            # The stop follows the slice as it really was: timers are late on a busy machine, the ratio is not.
            self._over.wait((time.monotonic() - running_since) * (self._factor - 1))
            running_since = time.monotonic()
            self._victim.let_go()
