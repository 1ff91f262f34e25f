"""Atomic replacement of a file: a draft is written beside the file and renamed. Readers see the old content or the new.

`replace_file` is for short contents that the caller has in memory; its errors are the system's own. `drafted` and
`write_whole` are for writers that want a path; they force the file to disk and raise a DistBeliefError.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from distbelief.errors import DistBeliefError

Verdict = TypeVar("Verdict")

ROOM_WAIT_S = 1800.0
"""How long a run waits for room on a full disk, where it cannot do without: time for a person to free some."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_whole(path: Path, write: Callable[[Path], object], check: Callable[[Path], Verdict]) -> Verdict:
    """Have `write` make a draft and `check` read it back; then it becomes `path`. An error leaves `path` as it was.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_whole(folder / "a", lambda draft: draft.write_text("x"), lambda draft: draft.read_text())
    'x'
    >>> [file.name for file in folder.iterdir()]
    ['a']
    """
    with drafted(path) as draft:
        with writing(path):
            write(draft)
        return check(draft)


def replace_file(path: Path, content: bytes, *, private: bool = False, durable: bool = False) -> None:
    """Write `content` to `path`. `private`: only the owner can read the file, also while it is a draft. `durable`: a
    crash of the machine cannot lose the file; otherwise only a crash of the process cannot."""
    draft = _draft_of(path)
    try:
        draft.unlink(missing_ok=True)  # of a killed process with our process number, perhaps with other rights
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if private else 0o666)
        with open(fd, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
        if durable:
            force_to_disk(path.parent)
    finally:
        _remove(draft)


def lacks_room(error: BaseException | None) -> bool:
    """Whether the disk is full, or a quota or a limit of file sizes is reached: a person can make room meanwhile.

    >>> lacks_room(OSError(errno.ENOSPC, "No space left on device")), lacks_room(OSError(errno.EIO, "I/O error"))
    (True, False)
    """
    return isinstance(error, OSError) and error.errno in _NO_ROOM


def force_to_disk(path: Path | str) -> None:
    """Make a file durable, or the names in a folder: a new name is durable only when its folder is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """An empty draft to be written; at the end of the block it becomes `path`. An error leaves `path` as it was."""
    draft = _draft_of(path)
    try:
        with writing(path):
            draft.touch()  # before the writer: some libraries hide the system's error
            mode = draft.stat().st_mode
        yield draft
        with writing(path):
            draft.chmod(mode)  # a writer that uses a temporary file leaves a file that only its owner can read
            force_to_disk(draft)
            draft.replace(path)
            force_to_disk(path.parent)
    finally:
        _remove(draft)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns any exception of the block into a DistBeliefError that says that `path` cannot be written."""
    try:
        yield
    except DistBeliefError:
        raise
    except Exception as error:
        raise _cannot_write(path, error) from error


def _draft_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.draft")


def _remove(draft: Path) -> None:
    try:
        draft.unlink(missing_ok=True)
    except OSError:  # the folder is gone or not writable: the writer has raised the cause
        return


def _cannot_write(path: Path, error: Exception) -> DistBeliefError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return DistBeliefError(f"cannot write {path}: {reason}", hint="give a file in a folder that you can write to")
