"""A run has failed before all hosts of its launch were there: those that come yet hear so where the coordinator was.

Without it they would offer themselves to nobody for minutes, since a coordinator may still be starting.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from distbelief.control.credentials import Authority
from distbelief.control.messages import EndRun, HostOffered, decode_event, encode
from distbelief.control.signatures import Refused
from distbelief.coordinator.journal import read as read_journal
from distbelief.coordinator.server import bind
from distbelief.errors import DistBeliefError
from distbelief.launch.launch import Invitation
from distbelief.launch.launchers.rules.place import Place

_LOOK_S = 0.2


@dataclass
class Missing:
    """Of a launch, who has not come yet. Hosts are counted where the launcher has named them, else their workers.

    >>> missing = Missing(hosts=1, workers=4)
    >>> missing.came("first", 2), missing.came("first", 2), missing.is_nobody
    (None, None, True)
    """

    hosts: int | None
    workers: int

    def __post_init__(self) -> None:
        self._nonces: set[str] = set()

    @classmethod
    def of(cls, place: Place) -> Missing:
        """All but this one."""
        return cls(len(set(place.peers)) - 1 if place.peers else None, place.workers - place.workers_here)

    def came(self, nonce: str, workers: int) -> None:
        if nonce not in self._nonces:
            self._nonces.add(nonce)
            self.hosts = None if self.hosts is None else self.hosts - 1
            self.workers -= workers

    @property
    def is_nobody(self) -> bool:
        return (self.workers if self.hosts is None else self.hosts) <= 0

    def __str__(self) -> str:
        count, what = (self.workers, "worker") if self.hosts is None else (self.hosts, "host")
        return f"{count} {what}{'s' * (count != 1)}"

    @property
    def in_words(self) -> str:
        return f"{self} that {'has' if str(self).startswith('1 ') else 'have'} not come yet"


def still_missing(place: Place, run_dir: Path, since: float) -> Missing:
    """By what the coordinator of a run that began then has written."""
    missing = Missing.of(place)
    with contextlib.suppress(OSError, DistBeliefError):
        for record in read_journal(run_dir / "journal.jsonl"):
            if record["kind"] == "host" and record["at"] >= since:
                missing.came(record["nonce"], record["room"])
    return missing


def turn_away(invitation: Invitation, missing: Missing, reason: str, patience_s: float) -> None:
    """Tell everybody who comes, until nobody is missing any more or that time is over. The coordinator has ended."""
    with contextlib.suppress(DistBeliefError, KeyboardInterrupt), _door(invitation) as (socket, authority):
        verifier, until = authority.verifier(), time.monotonic() + patience_s
        answer = encode(EndRun(1, "failed", reason))
        while not missing.is_nobody and time.monotonic() < until:
            if not socket.poll(int(_LOOK_S * 1000)):
                continue
            identity, *frames = socket.recv_multipart()
            with contextlib.suppress(ValueError, Refused, msgspec.MsgspecError):  # strangers are not answered
                signature, message = frames
                verifier.verify(signature, message, time.monotonic())
                event = decode_event(message)
                if isinstance(event, HostOffered):
                    socket.send_multipart([identity, answer])
                    missing.came(event.nonce, event.room)


@contextlib.contextmanager
def _door(invitation: Invitation) -> Iterator[tuple[zmq.Socket[bytes], Authority]]:
    authority = Authority(invitation.secret)
    with zmq.Context() as context:
        socket, _ = bind(context, authority.keys(), invitation.address)
        with socket:  # what was said last gets out
            yield socket, authority
