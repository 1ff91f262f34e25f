"""What a way to meet can do. The first process says one word: the invitation to its run, or that there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec

from distbelief.launch.invitation import Invitation

PATIENCE_S = 300.0
"""For the first process to begin: it reads the job, and the coordinator starts."""

LINGER_S = 3.0
"""How long it can be heard that there will be no run."""


class Word(msgspec.Struct, frozen=True):
    address: str = ""
    secret: str = ""
    over: int = -1
    """There is no run to take part in: the exit status to end with."""

    def __repr__(self) -> str:
        return f"Word({self.address!r}, over={self.over})"  # what is printed is read by others

    @property
    def invitation(self) -> Invitation | None:
        return Invitation(self.address, bytes.fromhex(self.secret)) if self.over < 0 else None


def invited(invitation: Invitation) -> Word:
    return Word(invitation.address, invitation.secret.hex())


class Meeting(Protocol):
    def listen(self) -> str:
        """The first process: where its coordinator is to listen, as an address for ZeroMQ."""

    def key_file(self) -> Path | None:
        """The file of the key that both sides have; None: the invitation carries the run's secret."""

    def known(self) -> Invitation | None:
        """What all others know without being told; None: nothing."""

    def tell(self, word: Word) -> None:
        """The first process: all others hear this."""

    def wait(self) -> Word:
        """Any other process: the word of the first."""

    def close(self) -> None: ...
