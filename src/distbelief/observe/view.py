"""The interface between the engine and a view of a run, and the choice of the view for an output stream.

A view reads the run directory for all other data; it communicates with no process of the run.
"""

from __future__ import annotations

import contextlib
import io
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TextIO, cast


class View(Protocol):
    """Shows a run. All calls come from one thread. `log` may come before `started`, and `close` more than once."""

    def started(self, run_dir: Path, workers: int) -> None:
        """The run directory exists; metrics.jsonl will grow in it."""

    def log(self, source: str, line: str) -> None:
        """A process printed this line. `source` is "worker 0" or "coordinator"."""

    def refresh(self) -> None:
        """Show new records. Called several times a second, and once at the end."""

    def close(self) -> None:
        """Show the remaining records and restore the terminal."""


class ViewStream(io.TextIOBase):
    """The stream of a view. What cannot be written is dropped: the reader of a pipe has gone (`| head`), the terminal
    has disappeared, the disk under a redirected output is full. A view must not end a run because of it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"


class GuardedView:
    """A view whose errors end the view only. What a view reads may be damaged in ways that nobody has thought of."""

    def __init__(self, view: View, stream: TextIO) -> None:
        self.view = view
        self._stream = stream
        self._is_silent = False

    def started(self, run_dir: Path, workers: int) -> None:
        self._attempt(lambda: self.view.started(run_dir, workers))

    def log(self, source: str, line: str) -> None:
        self._attempt(lambda: self.view.log(source, line))

    def refresh(self) -> None:
        self._attempt(self.view.refresh)

    def close(self) -> None:
        self._attempt(self.view.close)

    def _attempt(self, show: Callable[[], None]) -> None:
        if self._is_silent:
            return
        try:
            show()
        except Exception as error:
            self._is_silent = True
            with contextlib.suppress(Exception):  # a live view gives the terminal back
                self.view.close()
            why = traceback.format_exception_only(error)[-1].strip()
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}, line {where.lineno}"
            text = f"the view of the run has failed and is closed, the run itself goes on: {why} ({place})"
            print(text, file=self._stream, flush=True)


def open_view(stream: TextIO, *, plain: bool = False, elapsed_s: float = 0.0) -> GuardedView:
    """The live view on a terminal with cursor movement; plain lines everywhere else. `elapsed_s`: how long the run has
    been going on."""
    lenient = cast(TextIO, ViewStream(stream))
    if plain or not stream.isatty() or os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        from distbelief.observe.plain import PlainView

        return GuardedView(PlainView(lenient), lenient)
    from rich.console import Console

    from distbelief.observe.terminal import TerminalView

    return GuardedView(TerminalView(Console(file=lenient), elapsed_s=elapsed_s), lenient)
