"""Another user of the machine: tries all that a process can, and prints what it has got at. Started as root by tests,
it becomes nobody first."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from distbelief.control.connectionlimit import MOST_UNAUTHENTICATED

NOBODY = 65534


def main() -> None:
    run_dir, pids, doors = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    assert os.listdir(run_dir), "it can look into the folder"
    got: list[str] = []

    def attempt(what: str, act: Callable[[], object]) -> None:
        with contextlib.suppress(OSError):
            act()
            got.append(what)

    for name in ("coordinator.json", "parcel.bin"):
        if (run_dir / name).exists():
            attempt(f"reads {name}", lambda name=name: (run_dir / name).read_bytes())  # type: ignore[misc]
    attempt("connects to the join socket", lambda: join(run_dir))
    attempt("writes into the run directory", lambda: (run_dir / "mine").write_text("x"))
    for pid in pids:
        for what in ("environ", "mem", "maps"):
            attempt(f"reads {what} of {pid}", lambda pid=pid, what=what: Path(f"/proc/{pid}/{what}").read_bytes())  # type: ignore[misc]
        attempt(f"lists the descriptors of {pid}", lambda pid=pid: os.listdir(f"/proc/{pid}/fd"))  # type: ignore[misc]
        for fd in range(64):
            attempt(
                f"opens descriptor {fd} of {pid}", lambda pid=pid, fd=fd: os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
            )  # type: ignore[misc]
        attempt(f"signals {pid}", lambda pid=pid: os.kill(pid, 0))  # type: ignore[misc]
    for host, port in doors:
        if heard(f"tcp://{host}:{port}"):
            got.append(f"is answered at port {port}")
    for host, port in doors:
        if (standing := crowd(host, port)) > MOST_UNAUTHENTICATED:
            got.append(f"has {standing} connections at port {port}")
    print(json.dumps(got))


def join(run_dir: Path) -> None:
    os.chdir(run_dir)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.connect("join.sock")


def heard(address: str) -> bool:
    with zmq.Context() as context, context.socket(zmq.DEALER) as door:
        door.setsockopt(zmq.LINGER, 0)
        door.connect(address)
        for frames in ([b"x"], [b"", b"x"], [bytes(49), b"\x90"], [bytes(49), b"\x90", b"x"]):
            with contextlib.suppress(zmq.Again):
                door.send_multipart(frames, zmq.NOBLOCK)
        return bool(door.poll(300))


def crowd(host: str, port: int) -> int:
    """Connect very often and say nothing: how many of the connections are left after a while."""
    with contextlib.ExitStack() as stack:
        crowd = []
        for _ in range(MOST_UNAUTHENTICATED + 300):
            crowd.append(stack.enter_context(socket.socket()))
            crowd[-1].connect((host, port))
            crowd[-1].setblocking(False)
        deadline = time.monotonic() + 10  # before who shakes no hands is disconnected anyway
        while (standing := sum(map(is_open, crowd))) > MOST_UNAUTHENTICATED and time.monotonic() < deadline:
            time.sleep(0.1)
        return standing


def is_open(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1000))  # a greeting
    except BlockingIOError:
        return True
    except OSError:
        return False


if __name__ == "__main__":
    main()
