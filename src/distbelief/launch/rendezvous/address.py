"""Meeting at an address that everybody knows, with a key that everybody has: nothing needs to be said."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from distbelief.control.addresses import tcp
from distbelief.control.keyfiles import read_key, run_secret
from distbelief.errors import DistBeliefError
from distbelief.launch.invitation import Invitation
from distbelief.launch.rendezvous.interface import LINGER_S, PATIENCE_S, Word
from distbelief.launch.rendezvous.ownaddress import address_behind

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


class Address:
    """`where`: HOST:PORT of the first process. The run's coordinator listens there itself."""

    def __init__(self, where: str, key: Path) -> None:
        self._host, self._port = split(where)
        self._key = key

    def listen(self) -> str:
        return tcp(address_behind(self._host), self._port)

    def key_file(self) -> Path:
        return self._key

    def known(self) -> Invitation:
        return Invitation(self.listen(), run_secret(read_key(self._key)))

    def tell(self, word: Word) -> None:
        """They know."""

    def wait(self) -> Word:
        return Word(tcp(self._host, self._port), run_secret(read_key(self._key)).hex())

    def close(self) -> None:
        pass


class Board:
    """The launcher itself is at that address, with a store for short texts: the first process puts there where its
    coordinator listens. The store is open to anybody; but whoever has not the key can neither pose as the coordinator
    nor join."""

    def __init__(self, where: str, job: str, key: Path, patience_s: float = PATIENCE_S) -> None:
        self._host, self._port = split(where)
        self._name = f"distbelief {job}"
        self._key = key
        self._patience_s = patience_s
        self._opened: TCPStore | None = None

    def listen(self) -> str:
        self._opened = self._open()  # now: while it leads, the first process has no time for that
        return tcp(address_behind(self._host))

    def key_file(self) -> Path:
        return self._key

    def known(self) -> None:
        return None

    def tell(self, word: Word) -> None:
        text = word.address if word.over < 0 else f"over {word.over}"
        (self._opened or self._open()).set(self._name, text)
        if word.over >= 0:
            time.sleep(LINGER_S)

    def wait(self) -> Word:
        try:
            text = self._open().get(self._name).decode(errors="replace")
        except RuntimeError as error:
            raise DistBeliefError(
                f"the first process of this launch has left no word at {self._host}:{self._port}",
                hint="look at the output of the first host",
            ) from error
        if text.startswith("over "):
            status = text.removeprefix("over ")
            return Word(over=int(status) if status.isdecimal() else 1)
        return Word(text, run_secret(read_key(self._key)).hex())

    def _open(self) -> TCPStore:
        from torch._C._distributed_c10d import TCPStore  # seconds of importing, which only this way to meet needs

        return TCPStore(self._host, self._port, is_master=False, timeout=timedelta(seconds=self._patience_s))

    def close(self) -> None:
        pass


def split(where: str) -> tuple[str, int]:
    host, _, port = where.rpartition(":")
    return host.strip("[]"), int(port)
