"""Files in a folder that is a path or an fsspec URL: whole or not there, durable, and with errors in words.

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

from distbelief.checkpoint.faults import StorageFailed
from distbelief.errors import DistBeliefError

Where = str | os.PathLike[str]

_DRAFT = ".draft-"
_FULL = "free some space there, or keep fewer checkpoints"
_LOCAL_HINT = "check that the folder's path is right"
_STORE_HINT = "check the address, the keys and whether the store is up; what was sealed before is still there"
_RIGHTS = "check who may write and read there, or choose another folder"
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
    """As people know it, for messages."""
    local: bool

    def __truediv__(self, name: str) -> Folder:
        return replace(self, path=self.path_of(name), url=self.url_of(name))

    def path_of(self, name: str) -> str:
        return f"{self.path}/{name}"

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}"


def folder_at(where: Where) -> Folder:
    """The folder at a path or URL; nothing is made or looked up yet."""
    url = os.fspath(where).removeprefix("file://")
    if "://" not in url:
        # fsspec gives some characters of a path a meaning of their own ("::", "~"): a local path has no need of it
        path = os.path.abspath(url)
        return Folder(LocalFileSystem(), path.rstrip("/"), path.rstrip("/"), local=True)
    try:
        files, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise StorageFailed(
            f"cannot use {url}: {error}",
            hint="for S3: pip install 'distbelief[s3]'; for others, what the message names",
        ) from error
    except ValueError as error:
        raise StorageFailed(
            f"cannot use {url}: {error}", hint="give a path, or a URL such as s3://bucket/folder"
        ) from error
    return Folder(files, path.rstrip("/"), url.rstrip("/"), local=isinstance(files, LocalFileSystem))


@contextmanager
def explained(folder: Folder, action: str, url: str) -> Iterator[None]:
    """Turn what the disk or the store raises into one message with the place, the reason and a hint.

    Each object store's library has exceptions of its own, which share no class: so any of them, there.
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


def write_file(folder: Folder, name: str, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file, making its folder where needed. On return it is durable.

    After an error it is not there; or whole, where only the word that it had arrived was lost.
    """
    url = folder.url_of(name)
    path = folder.path_of(f".{name}{_DRAFT}{secrets.token_hex(4)}" if folder.local else name)
    with explained(folder, "write", url):
        file = _create(folder, path)
    try:
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
                _sync(folder.path)
    except BaseException:
        _abandon(folder, file, path)
        raise


def check_writable(where: Where) -> None:
    """Write a file there and remove it again: better now than after hours of training. Raises StorageFailed."""
    folder = folder_at(where)
    name = f".probe-{secrets.token_hex(4)}"
    write_file(folder, name, [b"x"])
    remove_file(folder, name)


def is_draft(name: str) -> bool:
    """Whether this is a file that was not finished: one in the making, or the rest of a process that was killed."""
    return name.startswith(".") and _DRAFT in name


def _create(folder: Folder, path: str) -> Any:
    try:
        return folder.files.open(path, "wb")
    except FileNotFoundError:  # object stores never say this: they have no folders, and buckets are not ours to make
        folder.files.makedirs(folder.path, exist_ok=True)
        if folder.local:
            parent = os.path.dirname(folder.path)
            _sync(parent)
            _sync(os.path.dirname(parent))
        return folder.files.open(path, "wb")


def _abandon(folder: Folder, file: Any, path: str) -> None:
    """Leave nothing of an unfinished file. Closing it would complete the upload of a file that is cut off."""
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


def _sync(path: str) -> None:
    """A new name is durable only once its folder is."""
    fd = os.open(path or "/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def entries(folder: Folder) -> dict[str, int | None]:
    """What lies in a folder: a file's size in bytes, None for a folder. Empty where there is no such folder."""
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
    """The whole file, or None where there is none."""
    with explained(folder, "read", folder.url_of(name)):
        try:
            return bytes(folder.files.cat_file(folder.path_of(name)))
        except FileNotFoundError:
            return None


def size_of(folder: Folder, name: str) -> int | None:
    """A file's size in bytes, or None where there is none."""
    with explained(folder, "read", folder.url_of(name)):
        folder.files.invalidate_cache()  # other processes write there too
        try:
            return int(folder.files.size(folder.path_of(name)) or 0)
        except FileNotFoundError:
            return None


def remove_file(folder: Folder, name: str) -> None:
    """Remove a file for good, if it is there."""
    with explained(folder, "remove", folder.url_of(name)), suppress(FileNotFoundError):
        folder.files.rm_file(folder.path_of(name))
        if folder.local:
            _sync(folder.path)


def remove_folder(folder: Folder) -> None:
    """Remove a folder with all that is in it, if it is there."""
    with explained(folder, "remove", folder.url):
        folder.files.invalidate_cache()
        with suppress(FileNotFoundError):
            folder.files.rm(folder.path, recursive=True)
