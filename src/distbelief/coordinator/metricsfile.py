"""The log of a run's steps: `metrics.jsonl` is its present part, `metrics-000001.jsonl.gz` and so on are full parts.

The coordinator appends lines, which are buffered and not synced: a crash may lose the last ones. While the disk has no
room, lines wait in memory and training goes on. A full part is renamed, then compressed in a thread, and described by
one line of `metrics-index.jsonl`: its first and last step, and the last evaluation and checkpoint up to its end. No
line is dropped by that. Everybody reads through this module: `records` gives all records of a run in constant memory,
`Tail` follows a growing log; replaying/records.py finds single steps. A run directory of earlier releases has the
present part only. Readers pass over damage: a line that is no record of its kind is dropped, and a part that cannot be
read ends early, with a notice among the records.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from distbelief.atomicfile import drafted
from distbelief.errors import DistBeliefError
from distbelief.steadyclock import CLOCK

Record = dict[str, Any]
File = BinaryIO | gzip.GzipFile

NAME = "metrics.jsonl"
INDEX = "metrics-index.jsonl"
PART_BYTES = 16 << 20
"""About 100,000 steps."""
MOST_WAITING_BYTES = 16 << 20
"""Lines that wait in memory while the disk has no room; more lines are dropped and counted."""
RECENT_BYTES = 1 << 20
"""What a view reads of a run that it did not follow from the start: some thousand steps."""
_SEARCH_BYTES = 64 << 20
"""How far back a present part is searched for its last evaluation; an earlier release may have left a very long one."""
_KEPT_STEPS = 10_000
_BLOCK = 1 << 20
_PART = re.compile(r"metrics-(\d{6,})\.jsonl(\.gz)?", re.ASCII)
_KINDS_IN_INDEX = ("evaluation", "checkpoint")
_KINDS_WITH_STEP = ("step", "evaluation", "checkpoint", "rollback")
UNREADABLE = (OSError, EOFError, zlib.error)
"""What reading a damaged part raises."""


# --- writing ---------------------------------------------------------------------------------------------------------


class MetricsFile:
    """Appends lines for people and dashboards. A disk without room never raises an error here."""

    def __init__(self, path: Path, part_bytes: int = PART_BYTES) -> None:
        self.path = path
        self._part_bytes = part_bytes
        self._lines: list[bytes] = []
        self._waiting = bytearray()
        """Bytes that the disk has not taken yet. A line may be on the disk in part: the rest follows."""
        self._dropped = 0
        self._trouble = ""
        self._since = 0.0
        self._packer = _Packer(path.parent)
        try:
            self._fd = _append_to(path)
            self._size_bytes = os.fstat(self._fd).st_size
            if self._size_bytes and os.pread(self._fd, 1, self._size_bytes - 1) != b"\n":
                self._waiting += b"\n"  # a killed coordinator may have left half a line: begin a new one
        except OSError as error:
            raise DistBeliefError(
                f"cannot write {path}: {error.strerror}", hint="check the run directory's permissions and free space"
            ) from error
        self._packer.go()

    @property
    def is_disk_full(self) -> bool:
        """Whether the disk did not take the last lines."""
        return bool(self._trouble)

    def add(self, line: Mapping[str, Any]) -> None:
        self._lines.append(msgspec.json.encode(line))

    def flush(self) -> str:
        """Write all lines that the disk takes. Returns a notice for people when that begins or ceases to fail. When it
        begins, the notices that were added since the last flush follow: views read them from the disk, so they would
        see them only when there is room again."""
        fresh, self._lines = self._lines, []
        for line in fresh:
            if self._trouble and len(self._waiting) + len(line) > MOST_WAITING_BYTES:
                self._dropped += 1
            else:
                self._waiting += line + b"\n"
        try:
            while self._waiting:
                written = os.write(self._fd, self._waiting)
                del self._waiting[:written]
                self._size_bytes += written
        except OSError as error:
            return self._begin_trouble(error, fresh)
        if self._size_bytes >= self._part_bytes:
            try:
                self._rotate()
            except OSError:  # the part grows on; the next try is a part later
                self._part_bytes += self._size_bytes
        return self._end_trouble() if self._trouble else ""

    def _begin_trouble(self, error: OSError, fresh: Iterable[bytes]) -> str:
        if self._trouble:
            return ""
        self._trouble, self._since = error.strerror or str(error), time.monotonic()
        notices = [str(one["text"]) for one in map(msgspec.json.decode, fresh) if one["kind"] == "notice"]
        text = f"cannot write {self.path}: {self._trouble}; its lines wait in memory, and training goes on"
        return "\n".join([text, *notices])

    def _end_trouble(self) -> str:
        lost = f"{self._dropped} lines were dropped" if self._dropped else "no line was lost"
        text = f"{self.path} can be written again after {time.monotonic() - self._since:.0f} s; {lost}"
        self._trouble, self._dropped = "", 0
        self.add({"kind": "notice", "text": f"the coordinator: {text}", "at": CLOCK.now()})
        return text

    def _rotate(self) -> None:
        """Give the full part its number, and begin another one. Readers keep the full part open meanwhile."""
        full = self.path.with_name(f"metrics-{newest_part(self.path.parent) + 1:06d}.jsonl")
        self.path.rename(full)
        try:
            fd = _append_to(self.path)
        except OSError:
            full.rename(self.path)
            raise
        os.close(self._fd)
        self._fd, self._size_bytes = fd, 0
        self._packer.go()

    def close(self) -> None:
        self._packer.stop()
        os.close(self._fd)


def _append_to(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


class _Packer:
    """Compresses full parts, oldest first, in a thread that gives way to all others. What it cannot finish, because the
    process ends or the disk is full, it does at the next rotation or the next start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def go(self) -> None:
        if (self._thread is None or not self._thread.is_alive()) and self._plain():
            self._thread = threading.Thread(target=self._run, name="packer", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _plain(self) -> list[Path]:
        return [path for _, path in _parts(self._folder) if path.suffix == ".jsonl"]

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        for draft in self._folder.glob(".metrics-*.draft"):  # of a killed coordinator
            draft.unlink(missing_ok=True)
        while not self._over.is_set() and (plain := self._plain()):
            try:
                pack(plain[0], self._over.is_set)
            except (OSError, DistBeliefError, InterruptedError):  # the part stays as it is, and can be read as it is
                return


def pack(part: Path, is_over: Callable[[], bool] = lambda: False) -> None:
    """Compress a full part and describe it in the index, then remove it. Raises InterruptedError when `is_over`."""
    known = read_index(part.parent)
    number = _number(part)
    entry: Record = {"part": number, "first": -1, "last": -1, "lines": 0}
    entry |= _last_before(part.with_name(NAME), number - 1)
    packed = part.with_name(part.name + ".gz")
    with drafted(packed) as draft, part.open("rb") as source, gzip.open(draft, "wb", compresslevel=6) as target:
        for lines in blocks_of_lines(source):
            if is_over():
                raise InterruptedError
            target.write(b"\n".join(lines) + b"\n")
            _describe(entry, lines)
    if number not in known:
        fd = _append_to(part.with_name(INDEX))
        with open(fd, "wb") as index:
            index.write(b"\n" * _is_torn(fd) + msgspec.json.encode(entry) + b"\n")
            index.flush()
            os.fsync(fd)
    part.unlink()


def _is_torn(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return bool(size) and os.pread(fd, 1, size - 1) != b"\n"


def _describe(entry: Record, lines: Iterable[bytes]) -> None:
    for line in lines:
        entry["lines"] += 1
        record = parse(line)
        if record is None:
            continue
        kind = record.get("kind")
        if kind == "step":
            step = record["step"]
            entry["first"] = step if entry["first"] < 0 else min(entry["first"], step)
            entry["last"] = max(entry["last"], step)
        elif kind in _KINDS_IN_INDEX:
            entry[kind] = record


# --- reading ---------------------------------------------------------------------------------------------------------


def records(path: Path) -> Iterator[Record]:
    """All records of a run, oldest first, in constant memory. `path`: of the present part, which need not exist."""
    tail = Tail(path)
    while found := tail.read():
        yield from found


class Tail:
    """The new records of a log that another process appends to; none while the file does not exist.

    Each `read` returns at most about a megabyte of lines, so a caller that wants all reads until there are none.
    """

    def __init__(self, path: Path, recent_bytes: int | None = None) -> None:
        """`recent_bytes`: begin with this much of the log's end. None: begin with its first line."""
        self._path = path
        self._recent_bytes = recent_bytes
        self._file: File | None = None
        self._number = 0
        """The part that is open, or was read last."""
        self._is_present = False
        self._rest = b""
        self._unreadable: set[int] = set()
        """Parts of which a notice says that they cannot be read."""
        self._notices: list[Record] = []

    def read(self) -> list[Record]:
        found: list[Record] = []
        while self._file is not None or self._open_next():
            assert self._file is not None
            # The part may be renamed at any time. Nothing is appended after that, so look at the name first.
            is_last = self._is_present and self._is_still_present()
            try:
                data = self._file.read(_BLOCK)
            except UNREADABLE as error:
                data = b""
                self._cannot_read(self._number, error)
            *lines, self._rest = (self._rest + data).split(b"\n")
            found += [record for record in map(parse, lines) if record is not None]
            if found or (not data and is_last):
                break
            if not data:
                self.close()
        found, self._notices = found + self._notices, []
        return found

    def _cannot_read(self, number: int, error: Exception) -> None:
        if number not in self._unreadable:
            self._unreadable.add(number)
            why = getattr(error, "strerror", None) or str(error)
            text = f"part {number} of {self._path} cannot be read to its end: {why}; its other records are not shown"
            self._notices.append({"kind": "unreadable", "text": text})

    def _open_next(self) -> bool:
        """Open the part after the last one, or, at the beginning, the part to begin with."""
        if self._recent_bytes is not None and self._number == 0:
            return self._open_near_the_end(self._recent_bytes)
        while True:
            wanted = self._number + 1
            numbers = _numbers(self._path.parent) if self._path.name == NAME else []
            older = [number for number in numbers if number >= wanted]
            if older:
                try:
                    opened = open_part(self._path.parent, older[0])
                except OSError as error:
                    self._cannot_read(older[0], error)
                    self._number = older[0]
                    continue
                if opened is None:
                    continue  # it was compressed at this moment
                self._file, self._number, self._is_present = opened, older[0], False
                return True
            try:
                opened = self._path.open("rb", buffering=0)
            except FileNotFoundError:
                if not _has_part(self._path, wanted):
                    return False
                continue
            except OSError as error:
                self._cannot_read(wanted, error)
                return False
            if _has_part(self._path, wanted):  # it was renamed at this moment
                opened.close()
                continue
            self._file, self._number, self._is_present = opened, wanted, True
            return True

    def _open_near_the_end(self, size_bytes: int) -> bool:
        self._recent_bytes = None
        self._number = max(_numbers(self._path.parent), default=0)
        if not self._open_next():
            return False
        assert self._file is not None
        size = os.fstat(self._file.fileno()).st_size
        if size > size_bytes:
            self._file.seek(size - size_bytes)
            self._rest = b"#"  # the first line is not whole, and is no JSON with this mark
        elif self._number > 1:
            self._rest = self._end_of_the_part_before(size_bytes - size)
        return True

    def _end_of_the_part_before(self, size_bytes: int) -> bytes:
        try:
            if before := open_part(self._path.parent, self._number - 1):
                with before:
                    return b"#" + _end_of(before, size_bytes)
        except UNREADABLE as error:
            self._cannot_read(self._number - 1, error)
        return b""

    def _is_still_present(self) -> bool:
        assert self._file is not None
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return not _has_part(self._path, self._number)
        here = os.fstat(self._file.fileno())
        return (there.st_ino, there.st_dev) == (here.st_ino, here.st_dev)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._rest = None, b""

    def __del__(self) -> None:
        self.close()


def last_evaluation_and_checkpoint(path: Path) -> list[Record]:
    """Of the run, oldest first, without reading the whole log."""
    found = {**_last_before(path, newest_part(path.parent)), **_last_in(path)}
    return sorted(found.values(), key=lambda record: float(record.get("at", 0.0)))


def _last_before(path: Path, number: int) -> dict[str, Record]:
    """The last record of each kind in the parts up to this one. A line of the index says it for all parts before; a
    part without one is searched."""
    found: dict[str, Record] = {}
    index = read_index(path.parent) if number > 0 else {}
    while number > 0 and len(found) < len(_KINDS_IN_INDEX):
        if entry := index.get(number):
            return {**{kind: entry[kind] for kind in _KINDS_IN_INDEX if kind in entry}, **found}
        part = path.with_name(f"metrics-{number:06d}.jsonl")
        found = {**(_last_in(part) if part.exists() else _last_in_packed(path.parent, number)), **found}
        number -= 1
    return found


def _last_in(path: Path) -> dict[str, Record]:
    found: dict[str, Record] = {}
    with contextlib.suppress(OSError), path.open("rb") as file:
        at = file.seek(0, os.SEEK_END)
        least = max(0, at - _SEARCH_BYTES)
        rest = b""
        while at > least and len(found) < len(_KINDS_IN_INDEX):
            begin = max(least, at - _BLOCK)
            file.seek(begin)
            block = file.read(at - begin) + rest
            at = begin
            for kind in _KINDS_IN_INDEX:
                if kind not in found and (record := _last_of(kind, block, begin == 0)):
                    found[kind] = record
            rest = block[: block.find(b"\n") + 1]
    return found


def _last_in_packed(folder: Path, number: int) -> dict[str, Record]:
    found: dict[str, Record] = {}
    with contextlib.suppress(*UNREADABLE):
        if file := open_part(folder, number):
            with file:
                for lines in blocks_of_lines(file):
                    block = b"\n".join(lines) + b"\n"
                    found |= {kind: record for kind in _KINDS_IN_INDEX if (record := _last_of(kind, block, True))}
    return found


def _last_of(kind: str, block: bytes, is_whole: bool) -> Record | None:
    """The last record of this kind in a block whose first line may lack its beginning."""
    end = len(block)
    while (at := block.rfind(b'"kind":"' + kind.encode() + b'"', 0, end)) >= 0:
        begin, close = block.rfind(b"\n", 0, at) + 1, block.find(b"\n", at)
        if close >= 0 and (begin > 0 or is_whole):
            record = parse(block[begin:close])
            if record is not None and record.get("kind") == kind:
                return record
        end = at
    return None


def parse(line: bytes) -> Record | None:
    """The record, or None for a torn line of a killed writer, or a damaged one: a view must not end a run because of
    it."""
    try:
        record = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    if not isinstance(record, dict):
        return None
    if record.get("kind") in _KINDS_WITH_STEP and not isinstance(record.get("step"), int):
        return None
    return record if isinstance(record.get("at", 0), int | float) else None


def blocks_of_lines(file: File) -> Iterator[list[bytes]]:
    rest = b""
    while block := file.read(_BLOCK):
        *lines, rest = (rest + block).split(b"\n")
        if lines:
            yield lines
    if rest:
        yield [rest]


def _end_of(file: File, size_bytes: int) -> bytes:
    end = b""
    while block := file.read(_BLOCK):
        end = (end + block)[-size_bytes:] if size_bytes else b""
    return end


def _parts(folder: Path) -> list[tuple[int, Path]]:
    """The full parts, oldest first; a part that is being compressed appears as it was before."""
    found: dict[int, Path] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _PART.fullmatch(path.name)
        if match and (match[2] is None or int(match[1]) not in found):
            found[int(match[1])] = path
    return sorted(found.items())


def _numbers(folder: Path) -> list[int]:
    return [number for number, _ in _parts(folder)]


def newest_part(folder: Path) -> int:
    return max(_numbers(folder), default=0)


def _number(path: Path) -> int:
    match = _PART.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is no part of a log of steps")
    return int(match[1])


def _has_part(path: Path, number: int) -> bool:
    part = path.with_name(f"metrics-{number:06d}.jsonl")
    return path.name == NAME and (part.exists() or part.with_name(part.name + ".gz").exists())


def open_part(folder: Path, number: int) -> File | None:
    """None: it was compressed between two looks."""
    plain = folder / f"metrics-{number:06d}.jsonl"
    with contextlib.suppress(FileNotFoundError):
        return plain.open("rb")
    with contextlib.suppress(FileNotFoundError):
        return gzip.GzipFile(plain.with_name(plain.name + ".gz"), "rb")
    return None


def read_index(folder: Path) -> dict[int, Record]:
    """Part -> its line of the index. A part without one is read instead."""
    with contextlib.suppress(OSError):
        lines = (folder / INDEX).read_bytes().split(b"\n")
        return {entry["part"]: entry for entry in map(parse, lines) if entry is not None and _is_sound(entry)}
    return {}


def _is_sound(entry: Record) -> bool:
    kept = [entry[kind] for kind in _KINDS_IN_INDEX if kind in entry]
    return all(isinstance(entry.get(name), int) for name in ("part", "first", "last")) and all(
        isinstance(record, dict) and isinstance(record.get("step"), int) for record in kept
    )
