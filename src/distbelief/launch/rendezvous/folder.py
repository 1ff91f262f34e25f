"""Meeting in a folder that all hosts see, the run directory: the word is a private file there.

It names its launch, so that what a killed launch has left there means nothing to the next one; and it is gone at the
end.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from distbelief.atomicfile import replace_file
from distbelief.control.addresses import tcp
from distbelief.errors import DistBeliefError
from distbelief.launch.rendezvous.interface import LINGER_S, PATIENCE_S, Word
from distbelief.launch.rendezvous.ownaddress import address_for

FILE = "meeting.json"
_LOOK_S = 0.2


class _Note(msgspec.Struct, frozen=True):
    job: str
    """Of which launch (Place.job)."""
    word: Word


class Folder:
    def __init__(self, folder: Path, job: str, peers: Sequence[str] = ()) -> None:
        self._path = folder / FILE
        self._job = job
        self._peers = peers
        self._called_off = False

    def listen(self) -> str:
        return tcp(address_for(self._peers))

    def key_file(self) -> None:
        return None

    def known(self) -> None:
        return None

    def tell(self, word: Word) -> None:
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, msgspec.json.encode(_Note(self._job, word)), private=True)
        except OSError as error:
            raise DistBeliefError(
                f"cannot leave a word for the other hosts in {folder}: {error.strerror}",
                hint="give a --run-dir on a disk that all hosts share and that you can write to",
            ) from error
        self._called_off = word.over >= 0

    def wait(self, patience_s: float = PATIENCE_S) -> Word:
        until = time.monotonic() + patience_s
        while (word := self._found()) is None:
            if time.monotonic() > until:
                raise DistBeliefError(
                    f"the first process of this launch has left no word in {self._path.parent}",
                    hint="is that folder on a disk that all hosts share? give one with --run-dir",
                )
            time.sleep(_LOOK_S)
            with contextlib.suppress(OSError):
                os.listdir(self._path.parent)  # a network disk may go on believing that there is no such file
        return word

    def _found(self) -> Word | None:
        try:
            with self._path.open("rb") as file:
                about = os.fstat(file.fileno())
                if (
                    about.st_uid != os.getuid() or about.st_mode & 0o077
                ):  # somebody else's: its job would be ours to run
                    return None
                note = msgspec.json.decode(file.read(), type=_Note)
        except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
            return None
        except OSError as error:
            raise DistBeliefError(
                f"cannot read {self._path}: {error.strerror}", hint="is the run directory yours?"
            ) from error
        return note.word if note.job == self._job else None

    def close(self) -> None:
        """Nothing of ours is left."""
        if self._called_off:
            time.sleep(LINGER_S)
        with contextlib.suppress(DistBeliefError):
            if self._found() is not None:
                self._path.unlink(missing_ok=True)
        if self._called_off:
            with contextlib.suppress(OSError):
                self._path.parent.rmdir()  # only if it is empty: the run did not even begin
