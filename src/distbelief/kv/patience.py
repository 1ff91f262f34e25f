"""How long a call waits."""

from __future__ import annotations

import time

from distbelief.errors import DistBeliefError
from distbelief.kv.link import Link


class TookTooLong(DistBeliefError):
    """A call was not answered in time. What was pushed still counts, once, if servers get it."""


class Patience:
    """Ends a wait when the service has ended, or when it takes too long. See `serverclient.Stop`."""

    def __init__(self, link: Link, seconds: float, what: str = "no answer", hint: str = "") -> None:
        self._link = link
        self._end = time.monotonic() + seconds
        self._text = f"{what} in {seconds:g} s"
        self._hint = hint

    def check(self) -> None:
        self._link.check()
        if time.monotonic() > self._end:
            raise TookTooLong(self._text, hint=self._hint)
