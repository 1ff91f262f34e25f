"""Asks the kernel to end a child process when its parent ends, for whatever reason; and names processes."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15

READER = "reader"
"""The name of the processes that run a data set's code."""


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the process `parent` ends; if it has ended already, end now."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def name_process(name: str) -> None:
    """Set the name of this process, at most 15 characters, in `top` and `ps -o comm`."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
