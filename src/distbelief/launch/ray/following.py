"""Files of the run directory that others write, as they grow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

_AT_ONCE = 1 << 20


class Growing:
    """The lines of one file, each once. A line that is not complete yet waits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def lines(self) -> list[bytes]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read(_AT_ONCE)
        except OSError:  # not there yet
            return []
        whole, end, _ = data.rpartition(b"\n")
        if not end and len(data) == _AT_ONCE:
            whole = data  # one endless line: a progress bar
        self._read += len(whole) + len(end)
        return whole.split(b"\n") if whole or end else []


class Logs:
    """What the processes of a run print, wherever they are: each has a file in the run directory's logs."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "logs"
        self._files: dict[Path, Growing] = {}

    def lines(self) -> Iterator[tuple[str, str]]:
        """(source, line)"""
        for path in sorted(self._folder.glob("*.log")):
            if path.stem == "ray":  # pages of its own state at every death, of which we tell in a line
                continue
            file = self._files.setdefault(path, Growing(path))
            for line in file.lines():
                yield path.stem.replace("-", " "), line.decode(errors="replace")


class Target:
    """How many workers the run is to have: as asked for, until the journal says otherwise (somebody scales)."""

    def __init__(self, run_dir: Path, workers: int) -> None:
        self._journal = Growing(run_dir / "journal.jsonl")
        self._workers = workers
        self._ended = False

    def read(self) -> tuple[int, bool]:
        """The number, and whether the run has ended."""
        for line in self._journal.lines():
            try:
                record = msgspec.json.decode(line)
            except msgspec.MsgspecError:  # the torn end of a coordinator that was killed
                continue
            if not isinstance(record, dict):
                continue
            if record.get("kind") == "scaled":
                self._workers = int(record["target"])
            if record.get("kind") in ("ended", "resumed"):
                self._ended = record["kind"] == "ended"
        return self._workers, self._ended
