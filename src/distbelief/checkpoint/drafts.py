"""Files that are there whole or not at all: a draft beside the file is written, checked, forced to disk and renamed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from distbelief.errors import DistBeliefError

Verdict = TypeVar("Verdict")


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


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """An empty draft to be written; at the end of the block it becomes `path`. An error leaves `path` as it was."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        with writing(path):
            draft.touch()  # before the writer: some of them say only in their own words what the system refused
            mode = draft.stat().st_mode
        yield draft
        with writing(path):
            draft.chmod(mode)  # a writer that goes by way of a temporary file leaves one that only its owner can read
            _force_to_disk(draft)
            draft.replace(path)
            _force_to_disk(path.parent)
    finally:
        _remove(draft)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever fails in the block is a failure to write that file."""
    try:
        yield
    except DistBeliefError:
        raise
    except Exception as error:
        raise _cannot_write(path, error) from error


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(draft: Path) -> None:
    try:
        draft.unlink(missing_ok=True)
    except OSError:  # a folder that is gone or closed to us: why has been said already
        return


def _cannot_write(path: Path, error: Exception) -> DistBeliefError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return DistBeliefError(f"cannot write {path}: {reason}", hint="give a file in a folder that you can write to")
