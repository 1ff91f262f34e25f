"""Merges the profiles of all workers into one trace that Perfetto, chrome://tracing and TensorBoard read. Pure.

Each worker becomes a process of the trace: its phases on one line, torch's operators on the lines of its threads below.
Process and thread numbers are assigned here, because those of the system may coincide on two hosts. The times of
workers on several hosts are converted to one clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distbelief.observe.profiling.parts import WorkerProfile

# --- one clock for the workers of several hosts -------------------------------------------------------------------

WAIT = "wait"


def ahead(parts: Sequence[WorkerProfile]) -> dict[str, int | None]:
    """The lead of each host's clock over that of the first profile's host, in nanoseconds; None: unknown."""
    if not parts:
        return {}
    reference = parts[0].host
    ends = {part.name: _last_waits(part) for part in parts}
    told: dict[str, int | None] = {}
    for host in dict.fromkeys(part.host for part in parts):
        differences = [
            theirs - ends[mine.name][step]
            for mine in parts
            if mine.host == reference
            for other in parts
            if other.host == host
            for step, theirs in ends[other.name].items()
            if step in ends[mine.name]
        ]
        told[host] = 0 if host == reference else round(statistics.median(differences)) if differences else None
    return told


def _last_waits(part: WorkerProfile) -> dict[str, int]:
    """Step -> the end of the last wait in that step."""
    ends = sorted(
        start + took for phase, start, took, _, thread in part.spans if phase == WAIT and thread == part.thread
    )
    found = {}
    for phase, start, took, _, _ in part.spans:
        if phase.startswith("step "):
            inside = [end for end in ends if start <= end <= start + took]
            if inside:
                found[phase] = inside[-1] + part.since_ns
    return found


Trace = dict[str, Any]
Event = dict[str, Any]

PHASE = "phase"
"""The category of this program's own spans."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""The categories of a GPU's work."""
_PHASES, _TRAINING = 1, 2
"""Line numbers within a process."""
_LINES = 100
_DEVICES = 10_000
_ARROWS = 1 << 32
"""Offset between the arrow numbers of two processes; Perfetto needs integers."""


def merge(parts: Sequence[WorkerProfile], together: bool, notes: Iterable[str] = ()) -> Trace:
    """`together`: the members do steps in common, so the waits show the differences between their clocks. `notes`:
    further notes for the reader of the profile."""
    clocks = ahead(parts) if together else {part.host: None for part in parts}
    base = {part.name: part.since_ns - (clocks[part.host] or 0) for part in parts}
    zero = min((span[1] + base[part.name] for part in parts for span in part.spans), default=0)
    events: list[Event] = []
    for number, part in enumerate(parts, start=1):
        events += _names(number, part, parts)
        events += _spans(number, part, base[part.name] - zero)
        events += _operators(number, part, base[part.name] - zero)
    said = [*notes, *(note for part in parts for note in part.notes), *_of_clocks(clocks, parts)]
    first = parts[0] if parts else None
    return {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": zero,
        "otherData": {
            "program": "distbelief",
            "strategy": first.strategy if first else "",
            "steps": list(first.steps) if first else [],
            "workers": [
                {
                    "pid": number,
                    "worker": part.worker,
                    "host": part.host,
                    "place": part.place,
                    "whole": part.is_whole,
                    "operators_s": _covered_s(part),
                }
                for number, part in enumerate(parts, start=1)
            ],
            "notes": said,
        },
        "traceEvents": events,
    }


def _covered_s(part: WorkerProfile) -> float:
    """Seconds of the profile's steps in which operators were recorded."""
    if not part.operators or not part.spans:
        return 0.0
    until = part.operators_until or max(start + took for _, start, took, _, _ in part.spans)
    return max(until - min(span[1] for span in part.spans), 0) / 1e9


def _of_clocks(clocks: Mapping[str, int | None], parts: Sequence[WorkerProfile]) -> list[str]:
    if len(clocks) < 2:
        return []
    unknown = [host for host, one in clocks.items() if one is None]
    if unknown:
        return [f"the clocks of {', '.join(sorted(clocks))} are as these hosts have them: they may be apart"]
    reference = parts[0].host
    told = [f"{host} {one / 1e6:+.3f} ms" for host, one in clocks.items() if one is not None and host != reference]
    return [f"clocks were set to that of {reference}, by the steps' barriers: {', '.join(told)}"]


def _names(number: int, part: WorkerProfile, parts: Sequence[WorkerProfile]) -> list[Event]:
    again = [one for one in parts if one.worker == part.worker].index(part)
    title = f"worker {part.worker} on {part.host}" + (f", {part.place}" if part.place else "")
    if again:
        title += f" (process {again + 1})"
    return [
        _meta("process_name", number, 0, {"name": title}),
        _meta("process_sort_index", number, 0, {"sort_index": number}),
        _meta("thread_name", number, number * _LINES + _PHASES, {"name": "phases"}),
        _meta("thread_sort_index", number, number * _LINES + _PHASES, {"sort_index": _PHASES}),
    ]


def _meta(name: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


class _Threads:
    """The lines of a process, by thread number."""

    def __init__(self, number: int, training: int, first: int) -> None:
        self.names: list[Event] = []
        self._number = number
        self._known = {training: number * _LINES + first}
        self._next = number * _LINES + first + 1
        self._training = training

    def line(self, thread: int, name: str) -> int:
        if thread not in self._known:
            self._known[thread] = self._next
            self._next += 1
        line = self._known[thread]
        if not any(one["tid"] == line for one in self.names):
            self.names.append(_meta("thread_name", self._number, line, {"name": name}))
            self.names.append(_meta("thread_sort_index", self._number, line, {"sort_index": line}))
        return line


def _spans(number: int, part: WorkerProfile, shift_ns: int) -> list[Event]:
    """Spans of other threads than the training thread (autograd's, for a GPU) are on lines of their own."""
    others = _Threads(number, part.thread, _LINES // 2)
    events = []
    for phase, start, took, cpu, thread in part.spans:
        ours = thread == part.thread
        line = number * _LINES + _PHASES if ours else others.line(thread, "phases in another thread")
        times = {"ts": (start + shift_ns) / 1000, "dur": took / 1000, "tdur": cpu / 1000}
        events.append({"ph": "X", "cat": PHASE, "name": phase, "pid": number, "tid": line, **times})
    return others.names + events


def _operators(number: int, part: WorkerProfile, shift_ns: int) -> list[Event]:
    threads = _Threads(number, part.thread, _TRAINING)
    first = min((span[1] for span in part.spans), default=0) / 1000  # the profiler starts a step early
    devices: dict[tuple[Any, Any], tuple[int, int]] = {}
    named: list[Event] = []
    events = []
    for one in part.operators:
        pid, tid = number, 0
        if one["ts"] < first:
            continue
        if one.get("cat") in (*ON_DEVICE, "gpu_user_annotation"):
            pid, tid = _device(number, one, devices, named, part)
        elif isinstance(one["tid"], int):
            tid = threads.line(one["tid"], "operators" if one["tid"] == part.thread else "operators in another thread")
        else:
            continue
        event = {**one, "pid": pid, "tid": tid, "ts": one["ts"] + shift_ns / 1000}
        if "id" in one:
            event["id"] = number * _ARROWS + int(one["id"])
        events.append(event)
    return threads.names + named + events


def worker_of(pid: int) -> int:
    """The worker of a process number: of the worker itself, or of its GPU."""
    return pid // _DEVICES or pid


def _device(
    number: int, event: Event, known: dict[tuple[Any, Any], tuple[int, int]], named: list[Event], part: WorkerProfile
) -> tuple[int, int]:
    """(process, line) of a GPU event: a GPU is a process below its worker's, and its streams are lines."""
    key = event["pid"], event["tid"]
    if key not in known:
        pid = number * _DEVICES + (event["pid"] if isinstance(event["pid"], int) else 0)
        line = pid * _LINES + len(known)
        known[key] = pid, line
        named.append(_meta("process_name", pid, 0, {"name": f"GPU {event['pid']} of worker {part.worker}"}))
        named.append(_meta("process_sort_index", pid, 0, {"sort_index": number}))
        named.append(_meta("thread_name", pid, line, {"name": f"stream {event['tid']}"}))
    return known[key]
