"""Files in a folder given by a path or an fsspec URL: written completely or not at all, durable, with readable errors.

An object store shows a file when its upload is complete. A local disk shows every byte, so there a file is written
under another name, synced and renamed. This module knows nothing of checkpoints.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from distbelief.atomicfile import force_to_disk
from distbelief.checkpoint.faults import StorageFailed
from distbelief.errors import DistBeliefError

Where = str | os.PathLike[str]

_DRAFT = ".draft-"
_FULL = "free some space there, or keep fewer checkpoints"
_LOCAL_HINT = "check that the folder's path is right"
_STORE_HINT = "check the address, the keys and whether the store is up; sealed checkpoints are still there"
_RIGHTS = "check the read and write permissions there, or choose another folder"
_HINTS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "the file system or a limit of this process (ulimit -f) allows no larger file; raise it",
    errno.EROFS: "it is mounted read-only: mount it for writing, or choose another folder",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EIO: "the disk itself reports a fault: look at the system's log, and use another disk",
}


@dataclass(frozen=True)
class Folder:
    files: Any
    """The fsspec file system."""
    path: str
    url: str
    """The URL as people know it, for messages."""
    local: bool

    def __truediv__(self, name: str) -> Folder:
        return replace(self, path=self.path_of(name), url=self.url_of(name))

    def path_of(self, name: str) -> str:
        return f"{self.path}/{name}"

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}"


def folder_at(where: Where) -> Folder:
    """The folder at a path or URL; creates and looks up nothing."""
    url = os.fspath(where).removeprefix("file://")
    if "://" not in url:
        # fsspec interprets some characters ("::", "~"); a local path must be taken literally
        path = os.path.abspath(url)
        return Folder(LocalFileSystem(), path.rstrip("/"), path.rstrip("/"), local=True)
    try:
        files, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise StorageFailed(
            f"cannot use {url}: {error}",
            hint="for S3: pip install 'distbelief[s3]'; for other stores, install the package that the message names",
        ) from error
    except ValueError as error:
        raise StorageFailed(
            f"cannot use {url}: {error}", hint="give a path, or a URL such as s3://bucket/folder"
        ) from error
    return Folder(files, path.rstrip("/"), url.rstrip("/"), local=isinstance(files, LocalFileSystem))


@contextmanager
def explained(folder: Folder, action: str, url: str) -> Iterator[None]:
    """Turn an exception of the disk or the store into one message with the place, the reason and a hint.

    Each object store's library has its own exceptions without a common class, so for URLs every exception is caught.
    """
    try:
        yield
    except DistBeliefError:
        raise
    except Exception as error:
        if folder.local and not isinstance(error, OSError):
            raise
        reason, hint = _explain(error, _LOCAL_HINT if folder.local else _STORE_HINT)
        raise StorageFailed(f"cannot {action} {url}: {reason}", hint=hint) from error


def _explain(error: Exception, otherwise: str) -> tuple[str, str]:
    said = str(error) or type(error).__name__
    if not isinstance(error, OSError):
        return said, otherwise
    code = error.errno or (errno.EACCES if isinstance(error, PermissionError) else 0)
    return error.strerror or said, _HINTS.get(code, otherwise)


def write_file(folder: Folder, name: str, chunks: Iterable[bytes | memoryview], *, private: bool = False) -> None:
    """Write a file, and create its folder if needed. The file is durable on return. `private`: on a disk only the owner
    can read it.

    After an error the file does not exist; or it is complete, if only the confirmation was lost.
    """
    url = folder.url_of(name)
    path = folder.path_of(f".{name}{_DRAFT}{secrets.token_hex(4)}" if folder.local else name)
    with explained(folder, "write", url):
        file = _create(folder, path)
    try:
        if private and folder.local:
            with explained(folder, "write", url):
                os.chmod(path, 0o600)
        for chunk in chunks:
            with explained(folder, "write", url):
                file.write(chunk)
        with explained(folder, "write", url):
            if folder.local:
                file.flush()
                os.fsync(file.fileno())
            file.close()
            if folder.local:
                os.replace(path, folder.path_of(name))
                force_to_disk(folder.path or "/")
    except BaseException:
        _abandon(folder, file, path)
        raise


def create_file(folder: Folder, name: str, content: bytes, *, private: bool = False) -> bool:
    """Write a file that does not exist yet. Returns False if it exists. Of two processes at the same time, one creates
    it; object stores, and file systems without hard links, cannot promise that.
    """
    if name in entries(folder):
        return False
    if not folder.local:
        write_file(folder, name, [content], private=private)
        return True
    draft = f".{name}{_DRAFT}{secrets.token_hex(4)}"
    write_file(folder, draft, [content], private=private)
    with explained(folder, "write", folder.url_of(name)):
        try:
            os.link(folder.path_of(draft), folder.path_of(name))
        except FileExistsError:
            return False
        except OSError:
            os.replace(folder.path_of(draft), folder.path_of(name))
        finally:
            with suppress(FileNotFoundError):
                os.unlink(folder.path_of(draft))
        force_to_disk(folder.path or "/")
    return True


def check_writable(where: Where) -> None:
    """Write a test file and remove it, so that a run fails before training and not hours later. Raises
    StorageFailed."""
    folder = folder_at(where)
    name = f".probe-{secrets.token_hex(4)}"
    write_file(folder, name, [b"x"])
    remove_file(folder, name)


def is_draft(name: str) -> bool:
    """Whether the name is that of an unfinished file: still being written, or left by a killed process."""
    return name.startswith(".") and _DRAFT in name


def _create(folder: Folder, path: str) -> Any:
    try:
        return folder.files.open(path, "wb")
    # object stores never raise this: they have no folders, and this program does not create buckets
    except FileNotFoundError:
        folder.files.makedirs(folder.path, exist_ok=True)
        if folder.local:
            parent = os.path.dirname(folder.path)
            force_to_disk(parent)
            force_to_disk(os.path.dirname(parent))
        return folder.files.open(path, "wb")


def _abandon(folder: Folder, file: Any, path: str) -> None:
    """Remove an unfinished file. Closing it would complete the upload of a truncated file."""
    with suppress(Exception):
        if folder.local:
            with suppress(OSError):
                file.close()
            os.unlink(path)
        else:
            try:
                file.discard()
            finally:
                file.closed = True


def entries(folder: Folder) -> dict[str, int | None]:
    """The content of a folder: sizes of files in bytes, None for folders. Empty if the folder does not exist."""
    with explained(folder, "list", folder.url):
        folder.files.invalidate_cache()  # other processes write there too
        try:
            found = folder.files.ls(folder.path, detail=True)
        except FileNotFoundError:
            return {}
    return {
        item["name"].rstrip("/").rpartition("/")[2]: None if item["type"] == "directory" else int(item["size"] or 0)
        for item in found
    }


def read_file(folder: Folder, name: str) -> bytes | None:
    """The content of a file, or None if it does not exist."""
    with explained(folder, "read", folder.url_of(name)):
        try:
            return bytes(folder.files.cat_file(folder.path_of(name)))
        except FileNotFoundError:
            return None


def size_of(folder: Folder, name: str) -> int | None:
    """A file's size in bytes, or None if it does not exist."""
    with explained(folder, "read", folder.url_of(name)):
        folder.files.invalidate_cache()  # other processes write there too
        try:
            return int(folder.files.size(folder.path_of(name)) or 0)
        except FileNotFoundError:
            return None


def remove_file(folder: Folder, name: str) -> None:
    """Remove a file durably, if it exists."""
    with explained(folder, "remove", folder.url_of(name)), suppress(FileNotFoundError):
        folder.files.rm_file(folder.path_of(name))
        if folder.local:
            force_to_disk(folder.path or "/")


def remove_folder(folder: Folder) -> None:
    """Remove a folder with all its content, if it exists."""
    with explained(folder, "remove", folder.url):
        folder.files.invalidate_cache()
        with suppress(FileNotFoundError):
            folder.files.rm(folder.path, recursive=True)
