"""What Ray prints in the driver's process: into a file of the run, not between the lines of its view.

At every death Ray prints its own state, pages of it, from a thread of its own, and has no switch for that.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

_THREAD = "ray_listen_error_messages"


@contextlib.contextmanager
def quiet(path: Path) -> Iterator[None]:
    """While this lasts."""
    with path.open("a", buffering=1, errors="replace") as file, contextlib.redirect_stdout(_Parted(sys.stdout, file)):
        yield


class _Parted:
    """The stream that there was before, for everybody but that thread."""

    def __init__(self, usual: TextIO, file: TextIO) -> None:
        self._usual = usual
        self._file = file

    def write(self, text: str) -> int:
        return self._chosen().write(text)

    def flush(self) -> None:
        self._chosen().flush()

    def _chosen(self) -> TextIO:
        return self._file if threading.current_thread().name == _THREAD else self._usual

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)
