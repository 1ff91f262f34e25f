"""A worker's profile: instruments are attached at the window's first step and detached after its last one.

The spans are written to the run directory after every step, so they survive if the worker is killed; torch's operators
are written at the end of the window. A host that does not see the run directory sends its files in messages. An error
here never ends the run: it is logged, and the profile has less in it.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from torch.autograd.profiler import profile
from torch.profiler import ProfilerActivity

from distbelief.atomicfile import drafted
from distbelief.control.messages import PROFILE_FOLDER, TracePart
from distbelief.errors import JobError
from distbelief.strategies.base import Strategy
from distbelief.worker.profiling.instruments import REGROUP, Instruments, Spans
from distbelief.worker.spec import WorkerSpec

WARM_UP = 10
"""Steps before the first recorded step, in a run that is long enough: caches fill, memory is mapped, shards are
balanced."""
LENGTH = 10


def window(first: int, end: int, steps: int, stride: int = 1) -> tuple[int, int]:
    """The recorded steps [first, end) of a run with `steps` steps; `end` 0: the default window.

    `stride`: steps that are committed together. A window begins and ends at a multiple of it. Pure.

    >>> window(0, 0, steps=500), window(0, 0, steps=6), window(0, 0, steps=100, stride=8), window(30, 50, steps=40)
    ((10, 20), (3, 6), (16, 32), (30, 40))
    """
    if not end:
        warm_up = -(-min(WARM_UP, steps // 2) // stride) * stride
        first = warm_up if warm_up < steps else 0
        end = first + max(LENGTH, 2 * stride)
    if first >= steps:
        raise JobError(
            f"the profile is to begin at step {first}, but the run ends after {steps}",
            hint=f"give --profile-steps within 0:{steps}",
        )
    return first, min(end, steps)


MOST_EVENTS = 30_000
"""About half a second without a heartbeat on a slow machine; the coordinator declares a worker dead after a second."""
REHEARSAL_S = 0.3
"""CPU time of a rehearsal. The fastest operators take 10 µs while they are recorded."""
_QUIET = {"KINETO_LOG_LEVEL": "99"}


class Operators:
    """torch's operators, and its kernels on a GPU, recorded by torch's own profiler.

    When torch stops recording it processes its events, some microseconds each, and no other thread of the process runs
    meanwhile, not even the thread that sends heartbeats. A rehearsal therefore measures how many events a second of
    CPU time has, and the recording is limited to `MOST_EVENTS`. (This is the profiler of torch.autograd. torch.profiler
    is the same one, but imports the compiler first, which takes seconds.)"""

    def __init__(self, device: torch.device) -> None:
        for name, value in _QUIET.items():  # by default the profiler writes to stderr, the worker's log
            os.environ.setdefault(name, value)
        self._device = device.type if device.type == "cuda" else None
        self._profile: profile | None = None
        self._began = (0, 0)
        """The start of the recording: wall clock and CPU time."""
        self._budget_ns = self._spent_ns = 0
        """The limit of recorded CPU time, and the recorded CPU time."""
        self.recorded_ns = (0, 0)
        """(start, end) of the recording, by `time.perf_counter_ns`; the end is 0 while it runs."""
        self._per_s = MOST_EVENTS / REHEARSAL_S
        """Events per second of CPU time."""

    def set_up(self) -> None:
        """Start the profiler once. The first start takes seconds, so call it before training."""
        usual = self._per_s
        self.start(REHEARSAL_S)
        self.stop()
        self._per_s = usual

    def start(self, budget_s: float = 0.0) -> None:
        """Start recording, for `budget_s` of this thread's CPU time; 0: as much as the last rehearsal allows."""
        self._budget_ns = int((budget_s or MOST_EVENTS / self._per_s) * 1e9)
        self._profile = profile(use_device=self._device, use_kineto=True)
        self._profile.__enter__()  # type: ignore[no-untyped-call]
        self._began = (time.perf_counter_ns(), time.thread_time_ns())
        self.recorded_ns = (self._began[0], 0)

    def look(self) -> None:
        """Stop if the budget is spent. Called by the thread that called `start`, never during a backward pass: at its
        end autograd restores the profiler's earlier state."""
        if self._profile and not self.recorded_ns[1] and time.thread_time_ns() - self._began[1] > self._budget_ns:
            self._end()

    def _end(self) -> None:
        self.recorded_ns = (self._began[0], time.perf_counter_ns())
        self._spent_ns = time.thread_time_ns() - self._began[1]
        if self._device:  # a paused profiler loses its kernels: end it instead
            self._leave()
        else:
            assert self._profile is not None
            self._profile.toggle_collection_dynamic(False, [ProfilerActivity.CPU])

    def _leave(self) -> None:
        assert self._profile is not None
        self._profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        if not self.recorded_ns[1]:
            self._end()
        if not self._device:
            self._leave()
        if self._spent_ns > 0:
            self._per_s = max(self.count, 1) / (self._spent_ns / 1e9)

    @property
    def count(self) -> int:
        """Recorded events."""
        results = self._profile.kineto_results if self._profile else None
        return len(results.events()) if results else 0

    def write(self, path: Path) -> None:
        """torch's own trace, compressed."""
        assert self._profile is not None
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            raw = Path(folder) / "raw.json"
            self._profile.export_chrome_trace(str(raw))  # type: ignore[no-untyped-call]
            with raw.open("rb") as source, drafted(path) as draft, gzip.open(draft, "wb", compresslevel=3) as target:
                shutil.copyfileobj(source, target, 1 << 16)


STEP = "step"
_CHUNK_BYTES = 1 << 20


class Profiler:
    def __init__(
        self, spec: WorkerSpec, steps: int, strategy: Strategy, device: torch.device, send: Callable[[TracePart], None]
    ) -> None:
        assert spec.profile is not None
        self._steps = steps
        self._first, self._end = window(spec.profile.first, spec.profile.end, steps, strategy.stride)
        self._stride = strategy.stride
        self._spec = spec
        self._send = send
        self._folder = Path(spec.run_dir) / PROFILE_FOLDER
        self._name = f"worker-{spec.worker}-{os.getpid()}"
        self._state = "before"  # rehearsing · ready · during · over
        self._spans = Spans()
        self._instruments = Instruments(self._spans, strategy.instruments)
        self._operators: Operators | None = Operators(device)
        self._with_operators(Operators.set_up)
        self._file: BinaryIO | None = None
        self._step = -1
        self._since = (0, 0)
        """Start of the present step: wall clock and CPU time, in nanoseconds."""
        self._left_ns = 0
        """The end of the last generation, in nanoseconds."""
        self._place = ""

    # --- what the training thread tells ------------------------------------------------------------------------------

    def seated(self, place: str, sharing: int) -> None:
        """A generation is about to train. `place`: which part of the model this member has, for people. `sharing`:
        members that divide the steps among themselves and each count their own; 1: all train each step together."""
        self._place = place
        asked = self._spec.profile
        if self._state == "before" and asked and not asked.end:
            self._first, self._end = window(0, 0, max(self._steps // sharing, 1), self._stride)
        if self._state == "during" and self._left_ns:
            now = time.perf_counter_ns()
            self._spans.ended.append((REGROUP, self._left_ns, now - self._left_ns, 0, threading.get_native_id()))
            self._write_line({"place": place})

    def at(self, step: int) -> None:
        """The training thread is about to begin `step`; all earlier steps are done."""
        if step == self._step or self._state == "over":
            return
        try:
            self._leave_step()
            self._state = self._next_state(step)
            if self._state == "during":
                self._step, self._since = step, (time.perf_counter_ns(), time.thread_time_ns())
        except Exception:
            self._give_up()

    def left(self) -> None:
        """The generation has ended or was aborted; an unfinished step is recorded again by the next one."""
        self._step = -1
        self._left_ns = time.perf_counter_ns()

    def finish(self) -> None:
        """All steps are done: write the rest of the profile."""
        if self._state in ("rehearsing", "ready", "during"):
            try:
                self._leave_step()
                self._close()
                self._state = "over"
            except Exception:
                self._give_up()

    # --- the window --------------------------------------------------------------------------------------------------

    def _next_state(self, step: int) -> str:
        """Advance the state for this step. Operators are rehearsed two strides before the window and started one stride
        before, because both take time for which other members wait. A window at the run's beginning leaves less
        time."""
        state = self._state
        if state == "before":
            if not self._first - 2 * self._stride <= step < self._end:
                return state
            self._begin()
            state = "rehearsing"
            if step < self._first - self._stride:
                self._with_operators(lambda operators: operators.start(REHEARSAL_S))
                return state
            self._with_operators(Operators.start)
            state = "ready"
        if step >= self._end:
            self._close()
            return "over"
        if state == "rehearsing" and step >= self._first - self._stride:
            self._with_operators(Operators.stop)
            self._with_operators(Operators.start)
            state = "ready"
        if state == "ready" and step >= self._first:
            self._spans.take()
            state = "during"
        return state

    def _begin(self) -> None:
        self._folder.mkdir(exist_ok=True)
        self._file = (self._folder / f"{self._name}.spans").open("ab", buffering=0)
        spec = self._spec
        self._write_line(
            {
                "worker": spec.worker,
                "host": spec.host,
                "place": self._place,
                "strategy": spec.options.strategy,
                "steps": [self._first, self._end],
                "thread": threading.get_native_id(),
                "clock": [time.time_ns(), time.perf_counter_ns()],
            }
        )
        if self._operators:
            self._spans.at_end = lambda: self._with_operators(Operators.look)
        self._instruments.attach()

    def _with_operators(self, do: Callable[[Operators], None]) -> None:
        """Call `do`; if it raises, continue the profile without operators."""
        try:
            if self._operators:
                do(self._operators)
        except Exception as error:
            self._operators = None
            self._spans.at_end = lambda: None
            print(f"the profile has no operators: {type(error).__name__}: {error}", flush=True)

    def _leave_step(self) -> None:
        if self._step < 0 or self._state != "during":
            return
        started, cpu = self._since
        took = time.perf_counter_ns() - started
        ended = (f"{STEP} {self._step}", started, took, time.thread_time_ns() - cpu, threading.get_native_id())
        self._step = -1
        self._write_line([*self._spans.take(), ended])

    def _close(self) -> None:
        self._instruments.detach()
        self._with_operators(Operators.stop)
        self._with_operators(lambda operators: operators.write(self._folder / f"{self._name}.operators.gz"))
        self._write_line([*self._spans.take()])
        self._write_line({"over": True, "operators": self._operators.recorded_ns if self._operators else None})
        assert self._file is not None
        self._file.close()
        if self._spec.profile and self._spec.profile.is_sent:
            for path in sorted(self._folder.glob(f"{self._name}.*")):
                self._send_file(path)

    def _give_up(self) -> None:
        self._state = "over"
        self._instruments.detach()
        print("the profile of this worker ends here; training goes on", flush=True)
        traceback.print_exc()

    def _write_line(self, line: Any) -> None:
        assert self._file is not None
        self._file.write(msgspec.json.encode(line) + b"\n")

    def _send_file(self, path: Path) -> None:
        content = path.read_bytes()
        for at in range(0, len(content), _CHUNK_BYTES):
            self._send(TracePart(self._spec.worker, path.name, at, content[at : at + _CHUNK_BYTES]))
