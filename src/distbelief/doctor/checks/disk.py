"""Checks the disk of the run directory: whether it can be written, its free space, and the time of a durable write."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from distbelief.doctor.rules.report import Finding, duration, megabytes, ok, problem

WRITTEN_BYTES = 16 << 20
APPENDS = 12
LEAST_FREE_BYTES = 1 << 30
SLOW_BYTES_PER_S = 5e6
SLOW_APPEND_S = 0.25
"""The coordinator waits for one durable append with every decision."""


@dataclass(frozen=True)
class Disk:
    folder: str
    error: str = ""
    free: int = 0
    bytes_per_s: float = 0.0
    append_s: float = 0.0
    """Seconds until a small record is durable."""


def probe(run_dir: Path) -> Disk:
    """Measure the folder, or its nearest existing parent."""
    folder = run_dir.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        there = os.statvfs(folder)
        free = there.f_frsize * there.f_bavail
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".distbelief-doctor-", buffering=0) as file:
            before = time.monotonic()
            block = os.urandom(1 << 20)
            for _ in range(WRITTEN_BYTES // len(block)):
                _write(file.fileno(), block)
            os.fsync(file.fileno())
            speed = WRITTEN_BYTES / max(time.monotonic() - before, 1e-6)
            appends = [_append_s(file.fileno()) for _ in range(APPENDS)]
    except OSError as error:
        left = 0
        with contextlib.suppress(OSError):
            there = os.statvfs(folder)
            left = there.f_frsize * there.f_bavail
        return Disk(str(folder), error.strerror or str(error), left)
    return Disk(str(folder), "", free, speed, statistics.median(appends))


def _write(fd: int, block: bytes) -> None:
    rest = memoryview(block)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _append_s(fd: int) -> float:
    before = time.monotonic()
    _write(fd, b"x" * 200)
    os.fsync(fd)
    return time.monotonic() - before


def judge(found: Disk) -> Finding:
    about = "run directory"
    if found.error:
        return problem(
            about,
            f"{found.folder} cannot be written: {found.error}",
            "give a --run-dir on a disk with space that you may write to",
        )
    text = (
        f"{found.folder}: {megabytes(found.free)} free, {megabytes(found.bytes_per_s)}/s, "
        f"a record is durable in {duration(found.append_s)}"
    )
    if found.free < LEAST_FREE_BYTES:
        return problem(about, text, "free some space, or give a --run-dir elsewhere: checkpoints would not fit")
    if found.bytes_per_s < SLOW_BYTES_PER_S or found.append_s > SLOW_APPEND_S:
        return problem(
            about,
            text,
            "the disk is slow: give a --run-dir on a local one, and --checkpoints URL for files that other hosts read",
        )
    return ok(about, text)
