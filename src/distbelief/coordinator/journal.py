"""The journal: the coordinator's decisions as an append-only file of JSON lines, one durable record per decision.

A record is a flat JSON object whose last key is the CRC-32 of the object without it. A record counts once its line feed
is on disk. A crash during an append leaves a torn last line, which is cut off; any other damage is an error, and
`replace_damaged` begins a new journal with the records before it. A lock on a sibling file is held while the journal
is open. This module knows nothing of what records mean: see rules/replay.py. The journal is not compacted, because it
holds decisions only (docs/decisions/0021-the-journal-is-not-compacted.md).

Records have no version. `replay` ignores kinds that it does not know, and reads all kinds of earlier releases, so a run
directory of an earlier release can be resumed. A record of a known kind that lacks a needed field is refused with one
sentence (rules/replay.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from distbelief.atomicfile import force_to_disk, replace_file
from distbelief.errors import DistBeliefError
from distbelief.steadyclock import CLOCK

Entry = dict[str, Any]

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""How a file system says that it has no locks."""
_MARK = b',"crc32":'


class JournalDamaged(DistBeliefError):
    """A record before the last one is not whole."""


class Journal:
    """Open one with `Journal.open(path)`, in a `with` block."""

    def __init__(self, path: Path, lock_fd: int, fd: int, replayed: list[Entry], end: int) -> None:
        self.path = path
        self.replayed = replayed
        """The records from before this opening, oldest first."""
        self.epoch = 1 + max((int(entry.get("epoch", 0)) for entry in replayed), default=0)
        """The number of this incarnation of the coordinator."""
        self._lock_fd = lock_fd
        self._fd = fd
        self._end = end
        """Where the last whole record ends."""

    @classmethod
    def open(cls, path: Path) -> Journal:
        """Lock and replay the journal, and make a new epoch durable. Raises DistBeliefError if that is impossible."""
        try:
            lock_fd = _lock(path)
        except OSError as error:
            raise _cannot("write", path, error) from error
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            replayed, end = _replay(path.read_bytes(), path)
            os.ftruncate(fd, end)
            force_to_disk(path.parent)
            journal = cls(path, lock_fd, fd, replayed, end)
            reason = "a coordinator has taken over" if journal.epoch > 1 else "the run has begun"
            begun = {"kind": "epoch", "epoch": journal.epoch, "at": CLOCK.now(), "pid": os.getpid(), "reason": reason}
            journal.append(begun)
        except BaseException as error:
            for opened in (fd, lock_fd):
                if opened >= 0:
                    os.close(opened)
            if isinstance(error, OSError):
                raise _cannot("write", path, error) from error
            raise
        return journal

    def append(self, entry: Entry) -> None:
        """Write one record; it is durable when this returns. After an OSError the caller may try again."""
        line = _encode(entry)
        # Half a record of a failed try in the middle would make the next one, and so the whole journal, unreadable.
        if os.fstat(self._fd).st_size > self._end:
            os.ftruncate(self._fd, self._end)
        try:
            _write(self._fd, line)
            os.fsync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):  # a full disk may refuse that too: the next try does it
                os.ftruncate(self._fd, self._end)
            raise
        self._end = os.fstat(self._fd).st_size

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._lock_fd)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read(path: Path) -> list[Entry]:
    """The records of a journal, without locking or changing it, for readers beside the coordinator."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _cannot("read", path, error) from error
    return _replay(data, path)[0]


class JournalTail:
    """The records of a journal that another process writes, each once. It takes no lock.

    A coordinator cuts the last line off when the disk refused it or lost a part of it, and `replace_damaged` puts
    another file in the journal's place.
    """

    def __init__(self, path: Path) -> None:
        self.is_void = False
        """Whether the last `read` has found that records of earlier reads are gone. It has then returned all records
        that there are, and whatever followed from earlier ones must be forgotten."""
        self._path = path
        self._file = (0, 0)
        """Device and number of the file that was read."""
        self._end = 0
        """Always just after a line feed: what follows may be torn, and be cut off."""
        self._last = b""
        """The last line that was read. Where it does not stand any more, it was cut off."""

    def read(self) -> list[Entry]:
        """The new records; none while the file does not exist. Raises PermissionError."""
        self.is_void = False
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                file.seek(self._end - len(self._last))
                data = file.read()
                if self._end and (self._file != (status.st_dev, status.st_ino) or not data.startswith(self._last)):
                    self.is_void, self._end, self._last = True, 0, b""
                    file.seek(0)
                    data = file.read()
                self._file = status.st_dev, status.st_ino
        except PermissionError:
            raise
        except OSError:
            return []
        found = []
        *lines, rest = data[len(self._last) :].split(b"\n")
        for number, line in enumerate(lines, start=1):
            entry = _decode(line)
            if entry is None and number == len(lines) and not rest:
                break  # blocks of the last record may become visible out of order
            if entry is not None:
                found.append(entry)
            self._end += len(line) + 1
            self._last = line + b"\n"
        return found


def lock_file(lock: Path) -> int:
    """Make the file if needed, and lock it for this process alone. Returns the descriptor that holds the lock. Raises
    BlockingIOError while another process holds it."""
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in NO_LOCKS:
            raise DistBeliefError(
                f"the file system of {lock.parent} has no locks ({error.strerror}), which keep two coordinators apart",
                hint="give a --run-dir on a local disk, and --checkpoints with a folder on this one; "
                "or mount this one with locks (Lustre: -o flock, NFS: with lockd)",
            ) from error
        raise
    return fd


def _lock(path: Path) -> int:
    lock = path.with_name(path.name + ".lock")
    try:
        return lock_file(lock)
    except BlockingIOError as error:
        raise DistBeliefError(
            f"another coordinator is running this run: {lock} is locked",
            hint="wait for that run to end, or give this one a run directory of its own with --run-dir",
        ) from error


def replace_damaged(path: Path) -> Path:
    """Keep a copy of a damaged journal, and replace it by its records before the damage. Returns the copy.

    The last record of the new journal says which numbers are taken, so that none is used again.
    """
    lock_fd = _lock(path)
    try:
        data = path.read_bytes()
        whole = list(itertools.takewhile(lambda entry: entry is not None, map(_decode, data.split(b"\n"))))
        free_names = (path.with_name(f"{path.stem}-damaged-{number}.jsonl") for number in itertools.count(1))
        kept = next(name for name in free_names if not name.exists())
        note = {
            "kind": "damaged",
            "epoch": _highest(data, b"epoch"),
            "at": CLOCK.now(),
            "reason": f"the record in line {len(whole) + 1} of {kept.name} is damaged",
            "generation": _highest(data, b"generation"),
            "next_worker": 1 + _highest(data, b"workers?"),
            "next_server": 1 + _highest(data, b"servers?"),
        }
        # At any moment there is a journal: a process that is killed here leaves the damaged one.
        replace_file(kept, data, private=True, durable=True)
        content = b"".join(_encode(entry) for entry in [*whole, note] if entry)
        replace_file(path, content, private=True, durable=True)
    except OSError as error:
        raise _cannot("replace", path, error) from error
    finally:
        os.close(lock_fd)
    return kept


def _highest(data: bytes, name: bytes) -> int:
    """The highest number under this name, in damaged records too. A number that is too high does no harm."""
    found = re.findall(rb'"' + name + rb'":\[?([\d,]+)', data)
    return max((int(number) for numbers in found for number in numbers.split(b",") if number), default=0)


def _encode(entry: Entry) -> bytes:
    if not entry or "crc32" in entry:
        raise ValueError(f"a record needs at least one field, and none called crc32: {entry}")
    body = msgspec.json.encode(entry)
    return body[:-1] + _MARK + str(zlib.crc32(body)).encode() + b"}\n"


def _decode(line: bytes) -> Entry | None:
    """The record on this line (without its line feed), or None when it is damaged."""
    body, mark, tail = line.rpartition(_MARK)
    body += b"}"
    if not mark or not tail.endswith(b"}") or tail[:-1] != str(zlib.crc32(body)).encode():
        return None
    try:
        entry = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
    return entry if isinstance(entry, dict) else None


def _replay(data: bytes, path: Path) -> tuple[list[Entry], int]:
    """The records, and the offset at which the last whole record ends."""
    lines = data.split(b"\n")
    whole = lines[:-1]  # what follows the last line feed is torn, or nothing
    entries: list[Entry] = []
    end = 0
    for number, line in enumerate(whole, start=1):
        entry = _decode(line)
        if entry is None:
            if number == len(whole) and not lines[-1]:
                break  # blocks of the last record may reach the disk out of order: the line feed, but not the rest
            raise JournalDamaged(
                f"{path}, line {number}: the record is damaged",
                hint="the disk or another program has changed it; restore the file, or start in a new run directory",
            )
        entries.append(entry)
        end += len(line) + 1
    return entries, end


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _cannot(what: str, path: Path, error: OSError) -> DistBeliefError:
    return DistBeliefError(
        f"cannot {what} the journal {path}: {error.strerror or error}",
        hint="check that the run directory exists, that you may write to it, and that the disk is not full",
    )
