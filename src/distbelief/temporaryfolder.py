"""Private temporary folders that are removed although their process is killed: the next process that makes one does it.

A process holds a lock on its folder for as long as it lives; the kernel releases the lock of a process that is gone.
The folder's name contains the machine's boot, because a lock says nothing to the other machines that share the folder
for temporary files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@contextlib.contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """A new folder, readable by its owner alone, until the end of the `with` block. Folders of the same kind that
    processes of this user have left behind are removed first."""
    prefix = f"distbelief.{kind}.{_boot()}."
    _sweep(prefix)
    folder, lock = _make(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _boot() -> str:
    try:
        return _BOOT.read_text()[:8]
    except OSError:
        return "unknown"


def _make(prefix: str) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        with contextlib.suppress(FileNotFoundError):  # another process has removed it, because it was not locked yet
            lock = _opened(folder)
            with contextlib.suppress(OSError):  # a file system without locks: no process removes the folder
                fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_at(folder, lock):
                return folder, lock
            os.close(lock)


def _sweep(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            lock = _opened(folder)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its process lives
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _is_at(folder: Path, opened: int) -> bool:
    try:
        return os.path.samestat(folder.stat(), os.fstat(opened))
    except FileNotFoundError:
        return False
