"""What every process that is started for a benchmark has: one thread, loopback, this package, and a limit."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
TIMEOUT_S = 300

Command = list[str]


class DriverFailed(Exception):
    """A process of a driver failed; the message holds the end of what it printed."""


def environment() -> dict[str, str]:
    """One thread everywhere, and gloo on loopback, for all alike."""
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, **threads, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody had a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
