"""The interface between the engine and a view of a run, and the choice of the view for an output stream.

A view reads the run directory for all other data; it communicates with no process of the run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol, TextIO


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


def open_view(stream: TextIO, *, plain: bool = False) -> View:
    """The live view on a terminal with cursor movement; plain lines everywhere else."""
    if plain or not stream.isatty() or os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        from distbelief.observe.plain import PlainView

        return PlainView(stream)
    from rich.console import Console

    from distbelief.observe.terminal import TerminalView

    return TerminalView(Console(file=stream))
