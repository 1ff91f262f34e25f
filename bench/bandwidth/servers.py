"""Push and pull through parameter servers, in GB/s, beside copying the same bytes and sending them over raw sockets.

Each figure is for the same bytes twice: pushed and pulled, copied two times on one core, sent there and back over TCP
on loopback. Ours are the public client (`distbelief.kv`) and its servers: the client and the replicated slices of runs.
A push counts (the backup has it, where there is one) when the clock stops. All take turns within a repetition.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from distbelief import kv

SIZES_MB = (1, 25, 100)
MEMCPY, RAW = "memcpy, one core", "raw TCP, loopback"
WAYS = {
    "1 server, shared memory": (1, True),
    "1 server, TCP": (1, False),
    "2 servers with backup, shared memory": (2, True),
    "2 servers with backup, TCP": (2, False),
}
Actor = Callable[[int], None]
"""Moves the bytes of that many MB twice."""

ECHO = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
line, _ = listener.accept()
line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
buffer = bytearray(int(sys.argv[1]))
while size := int.from_bytes(line.recv(8, socket.MSG_WAITALL), "little"):
    view = memoryview(buffer)[:size]
    got = 0
    while got < size:
        got += line.recv_into(view[got:])
    line.sendall(view)
"""


def measure(console: Console, repetitions: int) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with contextlib.ExitStack() as stack:
            found = _measured(_actors(stack), repetitions)
    finally:
        torch.set_num_threads(threads)
    for size, figures in found.items():
        _show(console, size, figures)
    return found


def _actors(stack: contextlib.ExitStack) -> dict[str, Actor]:
    source = {mb: torch.randn(_elements(mb)) for mb in SIZES_MB}
    target = {mb: torch.empty(_elements(mb)) for mb in SIZES_MB}
    middle = {mb: torch.empty(_elements(mb)) for mb in SIZES_MB}

    def copied(mb: int) -> None:
        middle[mb].copy_(source[mb])
        target[mb].copy_(middle[mb])

    line = stack.enter_context(_echo(max(SIZES_MB)))

    def sent(mb: int) -> None:
        _there_and_back(line, memoryview(source[mb].numpy()).cast("B"), memoryview(target[mb].numpy()).cast("B"))

    actors: dict[str, Actor] = {MEMCPY: copied, RAW: sent}
    addresses = {servers: stack.enter_context(kv.serve(servers=servers)) for servers in (1, 2)}
    for name, (servers, shared) in WAYS.items():
        store = stack.enter_context(kv.connect(addresses[servers], shared_memory=shared))
        for mb in SIZES_MB:
            store.init(f"{name}/{mb}", torch.zeros(_elements(mb)))
        actors[name] = _pushing(store, name, source, target)
    return actors


def _pushing(store: kv.Store, name: str, source: dict[int, torch.Tensor], target: dict[int, torch.Tensor]) -> Actor:
    def pushed(mb: int) -> None:
        store.push(f"{name}/{mb}", source[mb])
        store.pull(f"{name}/{mb}", out=target[mb])
        store.wait()

    return pushed


def _measured(actors: dict[str, Actor], repetitions: int) -> dict[str, Any]:
    seconds: dict[int, dict[str, list[float]]] = {mb: {name: [] for name in actors} for mb in SIZES_MB}
    names = list(actors)
    for repetition in range(repetitions + 1):  # the first one faults memory in, and is not counted
        turn = repetition % len(names)
        for mb in SIZES_MB:
            times = 1 if mb > 10 else 8
            for name in names[turn:] + names[:turn]:
                began = time.perf_counter()
                for _ in range(times):
                    actors[name](mb)
                if repetition:
                    seconds[mb][name].append((time.perf_counter() - began) / times)
    found: dict[str, Any] = {}
    for mb, taken in seconds.items():
        found[f"{mb} MB"] = {
            name: {
                "gb_per_s": [2 * mb / 1000 / one for one in some],
                "over_memcpy": [base / one for base, one in zip(taken[MEMCPY], some, strict=True)],
                "over_raw_tcp": [base / one for base, one in zip(taken[RAW], some, strict=True)],
            }
            for name, some in taken.items()
        }
    return found


def _show(console: Console, size: str, figures: dict[str, Any]) -> None:
    table = Table("", "GB/s", "range", "over memcpy", "over raw TCP", title=f"Push and pull of {size}")
    for name, found in figures.items():
        speeds = found["gb_per_s"]
        ratios = [f"{statistics.median(found[key]):.2f}" for key in ("over_memcpy", "over_raw_tcp")]
        spread = f"{min(speeds):.2f} to {max(speeds):.2f}"
        table.add_row(name, f"{statistics.median(speeds):.2f}", spread, *ratios)
    console.print(table)


def _elements(mb: int) -> int:
    return mb * 1_000_000 // 4


@contextlib.contextmanager
def _echo(mb: int) -> Iterator[socket.socket]:
    """A process that sends back what it is sent."""
    process = subprocess.Popen([sys.executable, "-c", ECHO, str(mb * 1_000_000)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        with process.stdout as said, socket.create_connection(("127.0.0.1", int(said.readline()))) as line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield line
    finally:
        process.kill()
        process.wait()


def _there_and_back(line: socket.socket, out: memoryview, back: memoryview) -> None:
    line.sendall(len(out).to_bytes(8, "little"))
    line.sendall(out)
    got = 0
    while got < len(back):
        got += line.recv_into(back[got:])
