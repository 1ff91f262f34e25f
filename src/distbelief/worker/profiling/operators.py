"""What torch did meanwhile: its operators, and its kernels where there is a GPU, by torch's own profiler.

Its clock is not ours. Two marks whose times are known on both tell the difference.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

ANCHOR = "distbelief: a mark for the clocks"
_MARKS = 3
"""The first one is late: it sets things up."""
_KEPT = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "id", "bp")
_QUIET = {"KINETO_LOG_LEVEL": "99"}


class Operators:
    def __init__(self, device: torch.device) -> None:
        for name, value in _QUIET.items():  # it talks on stderr otherwise, which is the worker's log
            os.environ.setdefault(name, value)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._profile = profile(activities=activities, acc_events=True)
        self._marked: list[int] = []

    def start(self) -> None:
        self._profile.start()
        for _ in range(_MARKS):
            before = time.perf_counter_ns()
            with record_function(ANCHOR):
                self._marked.append((before + time.perf_counter_ns()) // 2)

    def stop(self) -> None:
        self._profile.stop()

    def write(self, path: Path) -> None:
        """In a file of events whose times are `time.perf_counter_ns` in microseconds."""
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            raw = Path(folder) / "raw.json"
            self._profile.export_chrome_trace(str(raw))
            found = json.loads(raw.read_bytes())
        events = on_our_clock(found["traceEvents"], self._marked)
        draft = path.with_suffix(".draft")
        with gzip.open(draft, "wb", compresslevel=3) as file:
            file.write(json.dumps(events).encode())
        draft.rename(path)


def on_our_clock(events: list[dict[str, Any]], marked_ns: list[int]) -> list[dict[str, Any]]:
    """The events that say what was done, without the marks. `marked_ns`: when the marks were made, by our clock.

    >>> mark = {"ph": "X", "cat": "user_annotation", "name": ANCHOR, "pid": 1, "tid": 1, "ts": 90.0, "dur": 1.0}
    >>> add = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 95.0, "dur": 2.0, "args": {}}
    >>> on_our_clock([mark, add], [5_000])
    [{'ph': 'X', 'cat': 'cpu_op', 'name': 'aten::add', 'pid': 1, 'tid': 1, 'ts': 10.0, 'dur': 2.0}]
    """
    marks = sorted(one["ts"] for one in events if one.get("name") == ANCHOR and one.get("cat") == "user_annotation")
    if len(marks) != len(marked_ns):
        raise ValueError(f"torch's profiler has {len(marks)} of {len(marked_ns)} marks")
    # A mark is made after its time is taken, never before: the least difference is the one with the least delay.
    ahead_us = min(theirs - ours / 1000 for theirs, ours in zip(marks, marked_ns, strict=True))
    return [
        {key: one[key] for key in _KEPT if key in one} | {"ts": one["ts"] - ahead_us}
        for one in events
        if one.get("ph") in ("X", "s", "f") and one.get("cat") not in ("Trace", None) and one.get("name") != ANCHOR
    ]
