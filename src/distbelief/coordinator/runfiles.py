"""The files of a run directory that the coordinator writes beside its journal: metrics lines and recordings of steps.

Unlike the journal's records, metrics lines are buffered and not synced: a crash may lose the last ones.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec

from distbelief.control.messages import PROFILE_FOLDER, TracePart
from distbelief.coordinator.rules.progress import REMEMBERED, Seen
from distbelief.errors import DistBeliefError

MOST_TRACE_BYTES = 1 << 30
"""The largest recording that one worker may send."""
_TAIL_BYTES = 1 << 20  # holds many more steps than are remembered
_TRACE_NAME = re.compile(r"worker-(\d+)-\d+\.[a-z]+(\.gz)?", re.ASCII)


class MetricsFile:
    """Appends lines for people and dashboards."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[bytes] = []
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                self._lines.append(b"")  # a killed coordinator may have left half a line: begin a new one
        except OSError as error:
            raise DistBeliefError(
                f"cannot write {path}: {error.strerror}", hint="check the run directory's permissions and free space"
            ) from error

    def add(self, line: dict[str, Any]) -> None:
        self._lines.append(msgspec.json.encode(line))

    def flush(self) -> None:
        if self._lines:
            data = memoryview(b"\n".join(self._lines) + b"\n")
            self._lines.clear()  # even if writing fails: the same lines would fail again and hold up all later ones
            while data:
                data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        os.close(self._fd)


def reported(path: Path) -> tuple[Seen, Seen]:
    """The last steps and the last evaluations in the metrics file that an earlier coordinator wrote."""
    steps: list[tuple[int, str]] = []
    evaluations: list[tuple[int, str]] = []
    floor = 0
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        for line in file.read(_TAIL_BYTES).split(b"\n"):
            try:
                entry = msgspec.json.decode(line)
            except msgspec.DecodeError:  # the first line read and the last line written may be incomplete
                continue
            if isinstance(entry, dict) and entry.get("kind") == "step":
                steps.append((int(entry["step"]), str(entry["fingerprint"])))
            elif isinstance(entry, dict) and entry.get("kind") == "evaluation":
                evaluations.append((int(entry["step"]), ""))
            elif isinstance(entry, dict) and entry.get("kind") == "rollback":  # later steps are reported again
                floor = int(entry["step"])
                steps = [one for one in steps if one[0] < floor]
                evaluations = [one for one in evaluations if one[0] <= floor]
    return _seen(steps, floor), _seen(evaluations, 0)


def _seen(found: list[tuple[int, str]], floor: int) -> Seen:
    found = found[-REMEMBERED:]
    return Seen(dict(found), min(step for step, _ in found)) if found else Seen(floor=floor)


def keep_trace(run_dir: Path, part: TracePart) -> str:
    """Write a piece of a recording into the run directory; writing it twice does no harm.

    Returns why it was not written, or "". Without a requested profile the folder does not exist, and nothing is
    written.
    """
    name = _TRACE_NAME.fullmatch(part.name)
    if not name or int(name[1]) != part.worker or not 0 <= part.at <= MOST_TRACE_BYTES - len(part.content):
        return f"worker {part.worker} sent a part of a profile with a wrong name or size"
    try:
        fd = os.open(
            run_dir / PROFILE_FOLDER / part.name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
        )
    except OSError as error:
        return f"the profile of worker {part.worker} cannot be written: {error.strerror}"
    with open(fd, "wb") as file:
        try:
            file.seek(part.at)
            file.write(part.content)
            file.flush()
        except OSError as error:  # a full disk: the journal reports it too, if it matters
            return f"the profile of worker {part.worker} cannot be written: {error.strerror}"
    return ""
