"""A run in a terminal of its own that can be taken away, as when an SSH session drops.

The command is the leader of the terminal's session: when the terminal is closed, the kernel sends it SIGHUP. What it
prints goes to a stream. If the process that holds the terminal dies, the terminal is gone as well, so nothing is left.

Run as a program, this module makes the terminal its own and becomes the command: TERMINAL COMMAND …
"""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import TextIO

_BLOCK_BYTES = 1 << 16


class Terminals:
    """One terminal after another, each for one command. `drop` may be called by another thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._open = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __enter__(self) -> Terminals:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._wake)

    def drop(self) -> bool:
        """Take the terminal away. Returns whether there is one."""
        with self._lock:
            was_open, self._open = self._open, False
            if was_open:
                os.eventfd_write(self._wake, 1)
            return was_open

    def run(self, command: Sequence[str]) -> tuple[int, bool]:
        """Run the command to its end. Returns its exit status, and whether its terminal was taken away."""
        master, slave = pty.openpty()
        with self._lock:
            self._open = True
        try:
            shim = [sys.executable, "-m", __name__, os.ttyname(slave), *command]
            process = subprocess.Popen(shim, stdin=subprocess.DEVNULL, start_new_session=True)
            try:
                dropped = self._copy(master, slave, process)
            except BaseException:  # Ctrl-C: its end, too, is that of a terminal
                os.close(master)
                master = -1
                process.wait()
                raise
            if dropped:
                os.close(master)
                master = -1
            return process.wait(), dropped
        finally:
            with self._lock:
                self._open = False
            for fd in (master, slave):
                if fd >= 0:
                    with contextlib.suppress(OSError):
                        os.close(fd)

    def _copy(self, master: int, slave: int, process: subprocess.Popen[bytes]) -> bool:
        """Pass on what the command prints, until it ends or its terminal is taken away (True)."""
        pidfd = os.pidfd_open(process.pid)
        try:
            while True:
                ready, _, _ = select.select([master, self._wake, pidfd], [], [])
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                    return True
                if master in ready:
                    self._show(os.read(master, _BLOCK_BYTES))
                elif pidfd in ready:  # and all that it has printed is read
                    return False
        finally:
            os.close(pidfd)

    def _show(self, data: bytes) -> None:
        self._stream.write(data.decode(errors="replace").replace("\r\n", "\n"))
        self._stream.flush()


def _become() -> None:
    path, command = sys.argv[1], sys.argv[2:]
    terminal = os.open(path, os.O_RDWR)  # the first one that a session's leader opens controls the session
    for fd in (0, 1, 2):
        os.dup2(terminal, fd)
    if terminal > 2:
        os.close(terminal)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if this command was started with nohup
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become()
