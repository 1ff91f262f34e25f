"""The files of a run directory that other processes write, read while they grow: the logs, and the journal.

Nothing here contacts a process of the run or takes a lock, so any number of readers can follow a run, from any machine
that sees its directory.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from distbelief.coordinator.journal import JournalTail

_AT_ONCE = 1 << 20


class GrowingFile:
    """Reads a file that grows: each complete line once."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        """`from_end`: only lines that are written from now on."""
        self._path = path
        self._read = path.stat().st_size if from_end and path.exists() else 0

    def lines(self) -> list[bytes]:
        """The next lines, at most 1 MiB of them."""
        try:
            with self._path.open("rb") as file:
                self._read = min(self._read, os.fstat(file.fileno()).st_size)  # a log may be cut off
                file.seek(self._read)
                data = file.read(_AT_ONCE)
        except OSError:  # the file does not exist yet
            return []
        whole, end, _ = data.rpartition(b"\n")
        if not end and len(data) == _AT_ONCE:
            whole = data  # one endless line: a progress bar
        self._read += len(whole) + len(end)
        return whole.split(b"\n") if whole or end else []


class Logs:
    """The output of all processes of a run: each has a file in the run directory's logs."""

    def __init__(self, run_dir: Path, *, without: Collection[str] = (), from_end: bool = False) -> None:
        """`without`: names of logs that are not read. `from_end`: only lines that are written from now on."""
        self._folder = run_dir / "logs"
        self._without = without
        self._files: dict[Path, GrowingFile] = {}
        if from_end:
            self._files = {path: GrowingFile(path, from_end=True) for path in self._folder.glob("*.log")}

    def lines(self) -> Iterator[tuple[str, str]]:
        """(source, line)"""
        for path in sorted(self._folder.glob("*.log")):
            if path.stem in self._without:
                continue
            file = self._files.setdefault(path, GrowingFile(path))
            for line in file.lines():
                yield path.stem.replace("-", " "), line.decode(errors="replace")


class History:
    """The facts of a run's journal that a reader beside the run asks for."""

    def __init__(self, run_dir: Path) -> None:
        self._journal = JournalTail(run_dir / "journal.jsonl")
        self._forget()

    def _forget(self) -> None:
        self.began_at: float | None = None
        """When the run began, or was resumed (seconds since 1970)."""
        self.generation = 0
        self.workers = 0
        self.ended: dict[str, Any] | None = None
        """The record of the run's end; None while the run goes on."""

    def read(self) -> bool:
        """Take in the new records. Returns whether there were any."""
        news = self._journal.read()
        if self._journal.is_void:
            self._forget()
        for record in news:
            match record.get("kind"):
                case "ended":
                    self.ended = record
                case "resumed":
                    self.ended, self.began_at = None, float(record["at"])
                case "generation":
                    self.generation, self.workers = int(record["generation"]), len(record["members"])
            if self.began_at is None and "at" in record:
                self.began_at = float(record["at"])
        return bool(news)
