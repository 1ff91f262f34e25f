"""Files of a profile that come from hosts which do not see the run directory: put where all others are."""

from __future__ import annotations

import os
import re
from pathlib import Path

from distbelief.control.messages import PROFILE_FOLDER, TracePart

MOST_BYTES = 1 << 30
_NAME = re.compile(r"worker-(\d+)-\d+\.[a-z]+(\.gz)?", re.ASCII)


def keep(run_dir: Path, part: TracePart) -> str:
    """Write it to its place, also if it comes twice. Returns why that was not done, else nothing. Where nobody
    has asked for a profile, there is no place."""
    name = _NAME.fullmatch(part.name)
    if not name or int(name[1]) != part.worker or not 0 <= part.at <= MOST_BYTES - len(part.content):
        return f"worker {part.worker} sent a part of a profile that has no place here"
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
        except OSError as error:  # a full disk: the journal will say so too, if it matters
            return f"the profile of worker {part.worker} cannot be written: {error.strerror}"
    return ""
