"""Reads the files that the workers of a profiled run write into its `profile` folder.

A worker writes its spans line by line, and its operators at the end; a killed worker leaves the spans written so far.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SPANS, OPERATORS = ".spans", ".operators.gz"
_KEPT = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "id", "bp")

Span = tuple[str, int, int, int, int]
"""As in worker/profiling/instruments.py: (phase, start, duration, CPU time, thread), by the worker's own clock."""


@dataclass(frozen=True)
class WorkerProfile:
    """The recording of one worker process."""

    name: str
    worker: int
    host: str
    place: str
    """The worker's part of a divided model."""
    strategy: str
    steps: tuple[int, int]
    """First and end of the requested steps."""
    thread: int
    """The training thread."""
    since_ns: int
    """The difference between nanoseconds since 1970 and the worker's clock."""
    spans: Sequence[Span] = ()
    operators: Sequence[dict[str, Any]] = ()
    """Events of torch's profiler, in microseconds of the worker's clock."""
    operators_until: int = 0
    """The end of the recording of operators, by the worker's clock; 0: at the end of the profile."""
    is_whole: bool = True
    """Whether the worker recorded all steps and said so."""
    notes: Sequence[str] = field(default_factory=tuple)


def read_parts(folder: Path) -> list[WorkerProfile]:
    """The profiles in a folder, by worker, then by age. A file whose first line is torn is ignored."""
    found = []
    for path in sorted(folder.glob(f"*{SPANS}")):
        found_by_torch, problem = _read_operators(path.with_name(path.name.removesuffix(SPANS) + OPERATORS))
        part = parse(path.name.removesuffix(SPANS), path.read_bytes(), found_by_torch, problem)
        if part:
            found.append(part)
    return sorted(
        found, key=lambda part: (part.worker, part.since_ns + min((span[1] for span in part.spans), default=0))
    )


def parse(
    name: str, content: bytes, torch_trace: Mapping[str, Any] | None = None, problem: str = ""
) -> WorkerProfile | None:
    """A profile from the lines of its file, of which the last may be torn, and from torch's trace."""
    lines = [line for line in map(_line, content.split(b"\n")) if line is not None]
    if not lines or not isinstance(lines[0], dict) or "worker" not in lines[0]:
        return None
    head, place, is_whole = lines[0], lines[0]["place"], False
    spans: list[Span] = []
    until = 0
    for line in lines[1:]:
        if isinstance(line, list):
            spans += [(str(one[0]), int(one[1]), int(one[2]), int(one[3]), int(one[4])) for one in line]
        else:
            place = line.get("place", place)
            is_whole = is_whole or bool(line.get("over"))
            until = (line.get("operators") or (0, 0))[1]
    worker = int(head["worker"])
    notes = []
    if not is_whole:
        last = max((int(span[0].removeprefix("step ")) for span in spans if span[0].startswith("step ")), default=None)
        known = f"up to step {last}" if last is not None else "before its first step was done"
        notes.append(f"worker {worker} on {head['host']} ended while it was recorded: this is what it had {known}")
    elif not spans:
        notes.append(f"worker {worker} on {head['host']} did none of these steps")
    if problem:
        notes.append(f"worker {worker} on {head['host']} has no operators: {problem}")
    wall, own = head["clock"]
    shift_ns = (torch_trace or {}).get("baseTimeNanoseconds", 0) - (int(wall) - int(own))
    operators = on_our_clock((torch_trace or {}).get("traceEvents", ()), shift_ns)
    return WorkerProfile(
        name, worker, str(head["host"]), str(place), str(head["strategy"]), (head["steps"][0], head["steps"][1]),
        int(head["thread"]), int(wall) - int(own), spans, operators, until, is_whole, tuple(notes),
    )  # fmt: skip


def _line(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def on_our_clock(events: Iterable[dict[str, Any]], shift_ns: int) -> list[dict[str, Any]]:
    """The events with a duration and the arrows between them, at times of the worker's own clock.

    >>> about = {"ph": "M", "name": "process_name", "pid": 1, "ts": 0.0, "args": {"name": "python"}}
    >>> add = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 95.0, "dur": 2.0, "args": {}}
    >>> on_our_clock([about, add], -85_000)
    [{'ph': 'X', 'cat': 'cpu_op', 'name': 'aten::add', 'pid': 1, 'tid': 1, 'ts': 10.0, 'dur': 2.0}]
    """
    return [
        {key: one[key] for key in _KEPT if key in one} | {"ts": one["ts"] + shift_ns / 1000}
        for one in events
        if one.get("ph") in ("X", "s", "f") and one.get("cat") not in ("Trace", None)
    ]


def _read_operators(path: Path) -> tuple[dict[str, Any] | None, str]:
    try:
        with gzip.open(path, "rb") as file:
            return dict(json.loads(file.read())), ""
    except FileNotFoundError:
        return None, "it had not written them"
    except (OSError, EOFError, ValueError, zlib.error) as error:
        return None, f"the file is damaged ({error})"
