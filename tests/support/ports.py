"""Ports for servers that other processes open later."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

_chosen = itertools.count(os.getpid() * 97)  # tests in other processes begin elsewhere


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody has, and that the kernel gives nobody who asks for any: it is below those."""
    above = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    below = above // 2
    for number in itertools.islice(_chosen, above - below):
        port = below + number % (above - below)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no port from {below} to {above} is free")
