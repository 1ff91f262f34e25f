"""Sends signals to processes of this run: stop, continue, slow down, end. The caller decides the process and the time.

A process is held by a pidfd from the moment its id is first read, so no signal can reach another process that was given
the same id. Only descendants of this process can be held.
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
    """One living process. Stops are counted: the process continues when every stop was released."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid = pid
        self._fd = fd
        self._holds = 0
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        """Whether the process runs. A zombie counts as dead: it does nothing any more."""
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
        """Let the process run and release it; may be called twice."""
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
    """Hold a descendant process; None if it is gone or is no descendant."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    # The id cannot be reused between these two lines without the descriptor reporting the process's end.
    victim = Victim(pid, fd)
    ours = False
    with contextlib.suppress(psutil.Error):
        ours = any(parent.pid == os.getpid() for parent in psutil.Process(pid).parents())
    if not ours or not victim.alive:
        victim.close()
        return None
    return victim


class Throttle:
    """Let a process run for 1/factor of the time, in slices of a few milliseconds, until `end` is called."""

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
            # The pause follows the real length of the slice: timers are late on a busy machine, the ratio is not.
            self._over.wait((time.monotonic() - running_since) * (self._factor - 1))
            running_since = time.monotonic()
            self._victim.let_go()
