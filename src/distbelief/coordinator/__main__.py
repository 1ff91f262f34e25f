"""`python -m distbelief.coordinator`: the coordinator as a process that ends with the launching process.

The launching process writes one JSON line to stdin (see `Order`) and reads one from stdout: {"address", "epoch"} when
the coordinator serves, {"error", "hint"} when it cannot. Stdin must stay open: its end means that the launching process
is gone. The exit status is 0 if the run ended in order (completed, failed or stopped, as the journal's last record
says).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq
from msgspec import Struct

from distbelief.atomicfile import ROOM_WAIT_S, lacks_room
from distbelief.control.connectionlimit import ConnectionLimit
from distbelief.control.credentials import KeyAuthority
from distbelief.control.messages import LEADER_GONE, SECRET_BYTES
from distbelief.control.signatures import Refusals
from distbelief.coordinator import client
from distbelief.coordinator import server as edge
from distbelief.coordinator.journal import Journal
from distbelief.coordinator.metricsfile import MetricsFile
from distbelief.coordinator.rules.replay import resumed
from distbelief.coordinator.rules.state import RunConfig, resume
from distbelief.coordinator.runfiles import reported
from distbelief.errors import DistBeliefError
from distbelief.lifeline import allow_open_files, die_with_parent
from distbelief.steadyclock import CLOCK

START_ROOM_WAIT_S = 300.0
"""How long the start of a coordinator that takes over waits for room: without one, members end after this time."""
_MAX_ORDER_BYTES = 1 << 20

T = TypeVar("T")


class Order(Struct, frozen=True, forbid_unknown_fields=True):
    """The launching process's request."""

    run_dir: str
    secret: str
    """The key's secret, in hexadecimal."""
    config: RunConfig
    start: str = ""
    """See `credentials.Authority`."""
    listen: str = edge.DEFAULT_LISTEN
    host: str = ""
    """The name of the machine on which the launching process runs."""
    clock_offset_s: float = CLOCK.offset_s
    """Of the launching process's clock: a coordinator that replaces another one goes on with the same clock."""
    resume: str = ""
    """Not empty: resume a run that is over, or whose members are all gone, with this strategy."""
    room_wait_s: float = ROOM_WAIT_S
    """How long a decision waits for room on a full disk."""


class EngineLink:
    """The two ways in which the launching process ends a run: SIGTERM, and the end of our stdin."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._terminated = False
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # Ctrl-C reaches the whole process group; the launching process decides
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self._terminated = True

    def fileno(self) -> int:
        return self._fd

    def read(self) -> str:
        if self._terminated:
            return "SIGTERM"
        waiting, _, _ = select.select([self._fd], [], [], 0)
        if waiting and not os.read(self._fd, 4096):
            return LEADER_GONE
        return ""


def main() -> int:
    die_with_parent(os.getppid())
    allow_open_files()
    engine = EngineLink(0)
    try:
        return _run(_read_order(0), engine)
    except DistBeliefError as error:
        _answer({"error": error.message, "hint": error.hint})
        print(f"coordinator: {error.message}", file=sys.stderr)
        return error.exit_code


def _run(order: Order, engine: EngineLink) -> int:
    run_dir = Path(order.run_dir)
    CLOCK.continue_from(order.clock_offset_s)
    path = run_dir / "journal.jsonl"
    # The first coordinator of a run, or of a resumption, reports a full disk at once: nothing depends on it yet.
    takes_over = not order.resume and path.exists() and path.stat().st_size > 0
    room_wait_s = min(order.room_wait_s, START_ROOM_WAIT_S) if takes_over else 0.0
    with (
        _when_there_is_room(lambda: Journal.open(path), room_wait_s, engine) as journal,
        contextlib.closing(MetricsFile(run_dir / "metrics.jsonl")) as metrics,
        zmq.Context() as context,
    ):
        authority = KeyAuthority(bytes.fromhex(order.secret), order.start)
        socket, address = edge.bind(context, authority.keys(), order.listen)
        refusals = Refusals()
        with socket, contextlib.closing(ConnectionLimit(socket, refusals)) as limit:
            known = reported(metrics.path)
            records, now = journal.replayed, CLOCK.now()
            if order.resume:
                records.append(resumed(resume(order.config, journal.epoch, now, records), order.resume, now))
                journal.append(records[-1])
            state = resume(order.config, journal.epoch, now, records, *known)
            with contextlib.ExitStack() as stack:

                def advertise() -> None:
                    stack.enter_context(client.advertised(run_dir, address, authority.run, journal.epoch, order.host))

                _when_there_is_room(advertise, room_wait_s, engine)
                _answer({"address": address, "epoch": journal.epoch})
                server = edge.Server(
                    *(socket, limit, journal, metrics, authority.verifier(), state),
                    parcel=lambda: _parcel(run_dir, order.start),
                    refusals=refusals,
                    room_wait_s=order.room_wait_s,
                )
                return edge.serve(server, engine)


def _when_there_is_room(act: Callable[[], T], room_wait_s: float, engine: EngineLink) -> T:
    """Wait for room on a full disk: the members train on, and a coordinator that gave up would be started again."""
    since = time.monotonic()
    waited = False
    while True:
        try:
            return act()
        except (OSError, DistBeliefError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if not lacks_room(cause) or time.monotonic() - since > room_wait_s or engine.read():
                if isinstance(error, DistBeliefError):
                    raise
                raise DistBeliefError(f"the coordinator cannot start: {error}", hint="free some space") from error
            if not waited:
                print(f"coordinator: {error}; it waits {room_wait_s:.0f} s for room", file=sys.stderr, flush=True)
            waited = True
        time.sleep(edge.RETRY_S)


class _ParcelHead(Struct, frozen=True):
    """The field of a parcel (launch/parcel.py) that the coordinator reads."""

    start: str


def _parcel(run_dir: Path, start: str) -> bytes:
    """The bytes that the launching process has prepared for agents of other hosts; b"": they are not ready.

    A parcel of another start, whose launching process was killed, would make agents of that start.
    """
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        content = (run_dir / "parcel.bin").read_bytes()
        if msgspec.msgpack.decode(content, type=_ParcelHead).start == start:
            return content
    return b""


def _read_order(fd: int) -> Order:
    # Not through sys.stdin: its buffer would hide from the poll what follows the line.
    data = b""
    while b"\n" not in data and len(data) < _MAX_ORDER_BYTES:
        more = os.read(fd, 65536)
        if not more:
            break
        data += more
    try:
        order = msgspec.json.decode(data.partition(b"\n")[0], type=Order)
        if len(bytes.fromhex(order.secret)) != SECRET_BYTES:
            raise ValueError(f"the secret must have {SECRET_BYTES} bytes")
    except ValueError as error:  # msgspec's errors are ValueErrors too
        raise DistBeliefError(
            f"the coordinator got a wrong start message: {error}",
            hint='it expects one JSON line on stdin: {"run_dir", "secret", "listen", "config"}',
        ) from error
    return order


def _answer(line: dict[str, object]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
