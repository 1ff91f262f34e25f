"""Processes on several hosts meet in a folder that all of them see: the first one leaves a word for the others.

The word is the invitation to a run, or that there will be none. It is a private file, gone at the end, and names its
launch, so that what a killed launch has left there means nothing to the next one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from distbelief.engines.invitation import Invitation
from distbelief.errors import DistBeliefError

FILE = "meeting.json"
PATIENCE_S = 300.0
"""For the first process to begin: it reads the job, and the coordinator starts."""
_LOOK_S = 0.2


class Word(msgspec.Struct, frozen=True):
    """What the first process has to say."""

    job: str
    """Of which launch (Place.job)."""
    address: str = ""
    secret: str = ""
    over: int = -1
    """There is no run to take part in; the exit status to end with."""

    @property
    def invitation(self) -> Invitation | None:
        return Invitation(self.address, bytes.fromhex(self.secret)) if self.over < 0 else None


def leave(folder: Path, word: Word) -> None:
    draft = folder / f".{FILE}.draft"
    draft.unlink(missing_ok=True)  # whatever its mode is
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(msgspec.json.encode(word))
    draft.rename(folder / FILE)


def find(folder: Path, job: str) -> Word | None:
    """The word of this launch, if it is there."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        try:
            word = msgspec.json.decode((folder / FILE).read_bytes(), type=Word)
        except msgspec.MsgspecError:  # another version's, or not ours at all
            return None
        except PermissionError as error:
            raise DistBeliefError(f"{folder / FILE} cannot be read: is the run yours?") from error
        return word if word.job == job else None
    return None


def wait_for(folder: Path, job: str, patience_s: float = PATIENCE_S) -> Word:
    until = time.monotonic() + patience_s
    while (word := find(folder, job)) is None:
        if time.monotonic() > until:
            raise DistBeliefError(
                f"the first process of this launch has left no word in {folder}",
                hint="is that folder on a disk that all hosts share? give one with --run-dir",
            )
        time.sleep(_LOOK_S)
        with contextlib.suppress(OSError):
            os.listdir(folder)  # a network disk may go on believing that there is no such file
    return word


@contextlib.contextmanager
def swept(folder: Path, job: str) -> Iterator[None]:
    """Afterwards nothing of this launch is left there."""
    try:
        yield
    finally:
        if find(folder, job) is not None:
            (folder / FILE).unlink(missing_ok=True)
