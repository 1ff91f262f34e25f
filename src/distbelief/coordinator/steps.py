"""Single steps of a run's log (metricsfile.py), found by its index."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from distbelief.coordinator.metricsfile import (
    RECENT_BYTES,
    UNREADABLE,
    Record,
    Tail,
    blocks_of_lines,
    newest_part,
    open_part,
    parse,
    read_index,
)

_KEPT_STEPS = 10_000
_MOST_WINDOWS = 2
"""A replay asks for an old step and for the last ones by turns."""


@dataclass(frozen=True)
class _Window:
    """Some steps of a part as it was at some size, and which steps the part has."""

    size_bytes: int
    begin: int
    """The first step that was kept; `_KEPT_STEPS` numbers are."""
    found: dict[int, Record]


class Steps:
    """The records of single steps, in little memory. Made for steps that are asked for in rising order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._windows: dict[int, _Window] = {}
        """Part -> what was kept of it; the part that was read last comes last."""
        self._index = {number: (entry["first"], entry["last"]) for number, entry in read_index(path.parent).items()}
        self._ranges: dict[int, tuple[int, int, int]] = {}
        """Of a part that was read and is not in the index: its size, its first and its last step."""
        self.last = self._last()
        """The last step that was recorded; -1: none."""

    def get(self, step: int) -> Record | None:
        """The last record of this step: a step that was executed again has several."""
        while True:
            newest = newest_part(self._path.parent)
            for number in range(newest + 1, 0, -1):
                first, last = self._index.get(number, (step, step))
                if first <= step <= last and (found := self._in_part(number, number > newest, step)):
                    return found
            if newest_part(self._path.parent) == newest:  # otherwise the part that was present has got a number
                return None

    def _in_part(self, number: int, is_present: bool, step: int) -> Record | None:
        """None also for a part that cannot be read, as for one that a crash has lost."""
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            file = self._path.open("rb", buffering=0) if is_present else open_part(self._path.parent, number)
            if file is None:
                return None
            stack.enter_context(file)
            size_bytes = os.fstat(file.fileno()).st_size
            known, first, last = self._ranges.get(number, (-1, 0, 0))
            if known == size_bytes and not first <= step <= last:
                return None
            window = self._windows.pop(number, None)
            if window is None or window.size_bytes != size_bytes or not 0 <= step - window.begin < _KEPT_STEPS:
                found = {}
                first, last = -1, -1
                with contextlib.suppress(*UNREADABLE):
                    for lines in blocks_of_lines(file):
                        for record in map(parse, lines):
                            if record is None or record.get("kind") != "step":
                                continue
                            there = record["step"]
                            first, last = there if first < 0 else min(first, there), max(last, there)
                            if step <= there < step + _KEPT_STEPS:
                                found[there] = record
                self._ranges[number] = size_bytes, first, last
                window = _Window(size_bytes, step, found)
            self._windows[number] = window
            while len(self._windows) > _MOST_WINDOWS:
                del self._windows[next(iter(self._windows))]
            return window.found.get(step)
        return None

    def _last(self) -> int:
        last = max([_last_step(Tail(self._path, RECENT_BYTES)), *(last for _, last in self._index.values())])
        return last if last >= 0 else _last_step(Tail(self._path))


def _last_step(tail: Tail) -> int:
    last = -1
    while found := tail.read():
        last = max([last, *(one["step"] for one in found if one.get("kind") == "step")])
    return last
