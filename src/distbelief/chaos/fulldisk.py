"""Fills a small file system that a run has for itself, and frees it again.

Only such a disk is filled: other programs of the machine must not lose theirs. So it is a mount of its own, of at most
a gibibyte, and no mount that every program uses.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from distbelief.atomicfile import lacks_room
from distbelief.chaos.rules.schedule import ScheduleError

MOST_BYTES = 1 << 30
NAME = "filled-by-chaos"
_SHARED = ("/", "/tmp", "/var", "/var/tmp", "/home", "/dev/shm", "/run", f"/run/user/{os.getuid()}", Path.home())


def check_own_disk(folder: Path) -> None:
    """Raise unless the folder, which need not exist yet, is on a small disk of the run's own."""
    where = folder.absolute()
    while not where.exists():
        where = where.parent
    device = where.stat().st_dev
    shared = [path for path in (*_SHARED, tempfile.gettempdir()) if Path(path).exists()]
    same = next((path for path in shared if os.stat(path).st_dev == device), None)
    there = os.statvfs(where)
    size_bytes = there.f_frsize * there.f_blocks
    if same is None and size_bytes <= MOST_BYTES:
        return
    why = f"is on the file system of {same}" if same else f"is on a file system of {size_bytes >> 20} MiB"
    raise ScheduleError(
        f"'fill disk' fills only a small disk that the run has for itself: {folder} {why}",
        hint="make one (as root: mount -t tmpfs -o size=64m tmpfs DIR) and give --run-dir DIR/chaos",
    )


class FullDisk:
    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def fill(self) -> int:
        """Take all room there is. Returns the number of bytes."""
        check_own_disk(self._path.parent)
        size_bytes, block = 0, bytes(1 << 20)
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            while block:
                try:
                    size_bytes += os.write(fd, block)
                    os.fsync(fd)
                except OSError as error:
                    if not lacks_room(error):
                        raise
                    block = block[: len(block) // 2]
        finally:
            os.close(fd)
        return size_bytes

    def free(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
