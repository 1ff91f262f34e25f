"""What a coordinator finds in the run directory beside its journal, and what it writes there for workers: the steps
that an earlier coordinator has reported, and recordings of steps.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from distbelief.control.messages import PROFILE_FOLDER, TracePart
from distbelief.coordinator.metricsfile import RECENT_BYTES, Tail
from distbelief.coordinator.rules.progress import REMEMBERED, Seen

MOST_TRACE_BYTES = 1 << 30
"""The largest recording that one worker may send."""
_TRACE_NAME = re.compile(r"worker-(\d+)-\d+\.[a-z]+(\.gz)?", re.ASCII)


def reported(path: Path) -> tuple[Seen, Seen]:
    """The last steps and the last evaluations in the log that an earlier coordinator wrote."""
    steps: list[tuple[int, str]] = []
    evaluations: list[tuple[int, str]] = []
    floor = 0
    tail = Tail(path, RECENT_BYTES)  # holds many more steps than are remembered
    while found := tail.read():
        for entry in found:
            if entry.get("kind") == "step" and "fingerprint" in entry:
                steps.append((int(entry["step"]), str(entry["fingerprint"])))
            elif entry.get("kind") == "evaluation":
                evaluations.append((int(entry["step"]), ""))
            elif entry.get("kind") == "rollback":  # later steps are reported again
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
