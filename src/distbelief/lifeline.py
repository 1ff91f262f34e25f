"""What a process of a run asks of the kernel: its end with its parent, a name, and many open files."""

from __future__ import annotations

import ctypes
import os
import resource
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15

_MOST_OPEN_FILES = 1 << 20
"""Containers may allow a billion, and some programs, which user code may start, try to close every number."""
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


def allow_open_files() -> None:
    """Raise the soft limit of open files to the hard limit: a coordinator has a connection per worker, and a leading
    process a descriptor per segment. Children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
