"""Follows a run through the files in its directory: its step, its members' processes, and its coordinator.

`advance` is a pure fold over the records of the journal and the metrics. `RunFollower` reads the growing files. This
module communicates with no process of the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from distbelief.coordinator.journal import JournalTail
from distbelief.coordinator.metricsfile import NAME, Record, Tail
from distbelief.steadyclock import CLOCK


@dataclass(frozen=True)
class Seen:
    """The known state of a run."""

    step: int = 0
    """Number of committed steps."""
    members: Mapping[int, int] = field(default_factory=dict)
    """Worker -> process id, in the newest generation."""
    servers: Mapping[int, int] = field(default_factory=dict)
    """Parameter server -> process id, in the newest map."""
    doubled: bool = False
    """Whether every slice of the parameters has a backup, and no copy is under way."""
    generation: int = 0
    started_at: float | None = None
    """When the first generation started (wall clock)."""
    ended: bool = False


def advance(seen: Seen, record: Record) -> Seen:
    """Fold one record of the journal or of the metrics into the state; other kinds of records are ignored."""
    match record.get("kind"):
        case "step":
            return replace(seen, step=max(seen.step, int(record["step"]) + 1))
        case "workers":  # while the member that reports steps is cut off, the others still report their progress
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
        case "resumed":
            return replace(seen, ended=False)
    return seen


class RunFollower:
    """Call `poll` repeatedly. `seen` is the present state; `records` has all records of the journal."""

    def __init__(self, run_dir: Path) -> None:
        self.seen = Seen()
        self.records: list[Record] = []
        self._journal = JournalTail(run_dir / "journal.jsonl")
        self._metrics = Tail(run_dir / NAME)
        self._run_dir = run_dir

    def poll(self) -> Seen:
        news = self._journal.read()
        if self._journal.is_void:
            self.records.clear()
            self.seen = Seen(step=self.seen.step)
        for record in news:
            # a new epoch's record has no time; it is read moments after it was written
            record.setdefault("at", CLOCK.now())
            self.records.append(record)
            self.seen = advance(self.seen, record)
        while found := self._metrics.read():
            for record in found:
                self.seen = advance(self.seen, record)
        return self.seen

    def coordinator(self) -> Record | None:
        """The coordinator's address and process id, or None while no coordinator runs."""
        try:
            found = json.loads((self._run_dir / "coordinator.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) else None
