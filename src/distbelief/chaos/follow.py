"""A run as seen from its directory while it goes on: the step, who its members are, where the coordinator is.

`advance` is a pure fold over the records of the journal and the metrics. `RunFollower` is the edge that reads the files
again and again. Nothing here talks to a process of the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from distbelief.observe.records import Record, Tail


@dataclass(frozen=True)
class Seen:
    """What is known of a run so far."""

    step: int = 0
    """Steps committed."""
    members: Mapping[int, int] = field(default_factory=dict)
    """Worker -> process, of the newest generation."""
    servers: Mapping[int, int] = field(default_factory=dict)
    """Parameter server -> process, by the newest map."""
    doubled: bool = False
    """Whether every slice of the parameters has a backup by it, and no copy is under way."""
    generation: int = 0
    started_at: float | None = None
    """When the first generation started (wall clock)."""
    ended: bool = False


def advance(seen: Seen, record: Record) -> Seen:
    """Fold one record in, of the journal or of the metrics; other kinds are skipped."""
    match record.get("kind"):
        case "step":
            return replace(seen, step=max(seen.step, int(record["step"]) + 1))
        case "workers":  # while the member that reports the steps is cut off, the others still say how far they are
            return replace(seen, step=max(seen.step, int(record["step"])))
        case "generation" if int(record["generation"]) > seen.generation:
            return replace(
                seen,
                generation=int(record["generation"]),
                members={int(member["worker"]): int(member["pid"]) for member in record["members"]},
                started_at=float(record["at"]) if seen.started_at is None else seen.started_at,
            )
        case "servers":
            placed = record["placement"]
            return replace(
                seen,
                servers={int(one["number"]): int(one["pid"]) for one in record["servers"]},
                doubled=-1 not in placed["map"]["backups"] and all(recruit == -1 for recruit in placed["recruits"]),
            )
        case "ended":
            return replace(seen, ended=True)
    return seen


class JournalTail:
    """The records of a journal, each once, also when a restarted coordinator cuts off a torn end or a compaction puts
    another file in its place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0  # always just after a line feed: what follows may be torn, and be cut off
        self._inode = 0
        self._seen: set[bytes] = set()

    def read(self) -> list[Record]:
        try:
            stat = self._path.stat()
            if stat.st_ino != self._inode or stat.st_size < self._offset:
                self._inode, self._offset = stat.st_ino, 0
            if stat.st_size == self._offset:
                return []
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        fresh = [line for line in whole.split(b"\n") if line and line not in self._seen]
        self._seen.update(fresh)
        return _records(fresh)


class RunFollower:
    """`poll` it; `seen` is the state then, `records` all that the journal has said, also what a compaction dropped."""

    def __init__(self, run_dir: Path) -> None:
        self.seen = Seen()
        self.records: list[Record] = []
        self._journal = JournalTail(run_dir / "journal.jsonl")
        self._metrics = Tail(run_dir / "metrics.jsonl")
        self._run_dir = run_dir

    def poll(self) -> Seen:
        for record in self._journal.read():
            record.setdefault("at", time.time())  # of a new epoch: it is read moments after it was written
            self.records.append(record)
            self.seen = advance(self.seen, record)
        for record in self._metrics.read():
            self.seen = advance(self.seen, record)
        return self.seen

    def coordinator(self) -> Record | None:
        """Its address and process, or None while there is none."""
        try:
            found = _records([(self._run_dir / "coordinator.json").read_bytes()])
        except FileNotFoundError:
            return None
        return found[0] if found else None


def _records(lines: list[bytes]) -> list[Record]:
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # torn by a kill
            continue
        if isinstance(record, dict):
            found.append(record)
    return found
