"""Notice of a failed launch: hosts that come after a run has failed are told so at the coordinator's address.

Without the notice they would offer themselves for minutes, since a coordinator may still be starting.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from distbelief.control.credentials import KeyAuthority
from distbelief.control.messages import EndRun, HostOffered, decode_event, encode
from distbelief.control.signatures import Refused
from distbelief.coordinator.journal import read as read_journal
from distbelief.coordinator.server import bind
from distbelief.errors import DistBeliefError
from distbelief.launch.launchers.rules.place import Place

_LOOK_S = 0.2


@dataclass
class Missing:
    """The part of a launch that has not come yet. Counts hosts if the launcher has named them, else workers.

    >>> missing = Missing(hosts=1, workers=4)
    >>> missing.came("first", 2), missing.came("first", 2), missing.is_empty
    (None, None, True)
    """

    hosts: int | None
    workers: int

    def __post_init__(self) -> None:
        self._nonces: set[str] = set()

    @classmethod
    def of(cls, place: Place) -> Missing:
        """All hosts but this one."""
        return cls(len(set(place.peers)) - 1 if place.peers else None, place.workers - place.workers_here)

    def came(self, nonce: str, workers: int) -> None:
        if nonce not in self._nonces:
            self._nonces.add(nonce)
            self.hosts = None if self.hosts is None else self.hosts - 1
            self.workers -= workers

    @property
    def is_empty(self) -> bool:
        return (self.workers if self.hosts is None else self.hosts) <= 0

    def __str__(self) -> str:
        count, what = (self.workers, "worker") if self.hosts is None else (self.hosts, "host")
        return f"{count} {what}{'s' * (count != 1)}"

    @property
    def in_words(self) -> str:
        return f"{self} that {'has' if str(self).startswith('1 ') else 'have'} not joined yet"


def still_missing(place: Place, run_dir: Path, since: float) -> Missing:
    """The missing hosts or workers, by the journal of the run that began at `since`."""
    missing = Missing.of(place)
    with contextlib.suppress(OSError, DistBeliefError):
        for record in read_journal(run_dir / "journal.jsonl"):
            if record["kind"] == "host" and record["at"] >= since:
                missing.came(record["nonce"], record["room"])
    return missing


def turn_away(address: str, authority: KeyAuthority, missing: Missing, reason: str, patience_s: float) -> None:
    """Answer every host that comes, until none is missing or the time is over. The coordinator has ended."""
    with contextlib.suppress(DistBeliefError, KeyboardInterrupt), _socket_at(address, authority) as socket:
        verifier, until = authority.verifier(), time.monotonic() + patience_s
        answer = encode(EndRun(1, "failed", reason))
        while not missing.is_empty and time.monotonic() < until:
            if not socket.poll(int(_LOOK_S * 1000)):
                continue
            identity, *frames = socket.recv_multipart()
            with contextlib.suppress(
                ValueError, Refused, msgspec.MsgspecError
            ):  # a message without a valid signature is not answered
                signature, message = frames
                verifier.verify(signature, message, time.monotonic())
                event = decode_event(message)
                if isinstance(event, HostOffered):
                    socket.send_multipart([identity, answer])
                    missing.came(event.nonce, event.room)


@contextlib.contextmanager
def _socket_at(address: str, authority: KeyAuthority) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context:
        socket, _ = bind(context, authority.keys(), address)
        with socket:  # closing the socket sends the last answers
            yield socket
