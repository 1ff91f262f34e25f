"""A loopback of our own: in a network namespace of this process, its counters count nothing but what we measure.

And orphans of what was started come back to us, so that nothing is left behind (and their processor time is known).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import time
from pathlib import Path

import psutil

CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PR_SET_CHILD_SUBREAPER = 36
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
END_S = 5.0


def own_loopback() -> str:
    """Move this process, and what it starts from now on, to a network of loopback alone. Empty, or why not."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(CLONE_NEWNET):
        return f"no network of our own: {os.strerror(ctypes.get_errno())} (root can make one)"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh22x", b"lo", 0)
        _, flags = struct.unpack("16sh22x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | IFF_UP))
    return ""


def own_shared_memory() -> None:
    """A /dev/shm of our own, where that is permitted: some peers leave their segments behind, and it goes with us."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(CLONE_NEWNS) or library.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        return
    library.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)


def loopback_bytes() -> int:
    """All that has been sent over this process's loopback, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return 0


def adopt_orphans() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> int:
    """End everything that descends from this process; how many there were."""
    there = psutil.Process().children(recursive=True)
    for one in there:
        _send(one, signal.SIGTERM)
    _, alive = psutil.wait_procs(there, timeout=END_S)
    deadline = time.monotonic() + END_S
    while alive and time.monotonic() < deadline:
        for one in alive:
            _send(one, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=1.0)
        alive = psutil.Process().children(recursive=True)  # what the dead have left to us
    return len(there)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
