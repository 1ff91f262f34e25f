"""What torch did meanwhile: its operators, and its kernels where there is a GPU, by torch's own profiler.

When torch stops recording, it works on what it has for some microseconds an event, and no other thread of the process
runs meanwhile: not the one either that tells the coordinator that this worker is alive. So no more than a bounded
number of events is recorded, by how many there were in a rehearsal. (It is the profiler of torch.autograd: that of
torch.profiler is the same, and imports the compiler first, for seconds.)
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from torch.autograd.profiler import profile
from torch.profiler import ProfilerActivity

from distbelief.atomicfile import drafted

MOST_EVENTS = 30_000
"""About half a second's silence on a slow machine; after a whole one a worker is taken for dead."""
REHEARSAL_S = 0.3
"""CPU time of a rehearsal. The quickest operators take 10 µs when they are recorded."""
_QUIET = {"KINETO_LOG_LEVEL": "99"}


class Operators:
    def __init__(self, device: torch.device) -> None:
        for name, value in _QUIET.items():  # it talks on stderr otherwise, which is the worker's log
            os.environ.setdefault(name, value)
        self._device = device.type if device.type == "cuda" else None
        self._profile: profile | None = None
        self._began = (0, 0)
        """Wall clock and CPU time."""
        self._budget_ns = self._spent_ns = 0
        """CPU time that it may record, and has recorded."""
        self.recorded_ns = (0, 0)
        """From when to when, by `time.perf_counter_ns`; the end is 0 while it goes on."""
        self._per_s = MOST_EVENTS / REHEARSAL_S
        """Events in a second of CPU time."""

    def set_up(self) -> None:
        """The first start takes seconds: now, that nobody waits."""
        usual = self._per_s
        self.start(REHEARSAL_S)
        self.stop()
        self._per_s = usual

    def start(self, budget_s: float = 0.0) -> None:
        """Record from here on, for so much CPU time of this thread; 0: as much as the last rehearsal allows."""
        self._budget_ns = int((budget_s or MOST_EVENTS / self._per_s) * 1e9)
        self._profile = profile(use_device=self._device, use_kineto=True)
        self._profile.__enter__()  # type: ignore[no-untyped-call]
        self._began = (time.perf_counter_ns(), time.thread_time_ns())
        self.recorded_ns = (self._began[0], 0)

    def look(self) -> None:
        """Now and then, by the thread that has started it: whether it is enough. Not in the middle of a backward pass,
        at whose end autograd puts back what it had found."""
        if self._profile and not self.recorded_ns[1] and time.thread_time_ns() - self._began[1] > self._budget_ns:
            self._end()

    def _end(self) -> None:
        self.recorded_ns = (self._began[0], time.perf_counter_ns())
        self._spent_ns = time.thread_time_ns() - self._began[1]
        if self._device:  # told to pause, torch forgets the kernels that it has seen: it works on them now
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
        """Events that it has recorded."""
        results = self._profile.kineto_results if self._profile else None
        return len(results.events()) if results else 0

    def write(self, path: Path) -> None:
        """As torch has it, compressed."""
        assert self._profile is not None
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            raw = Path(folder) / "raw.json"
            self._profile.export_chrome_trace(str(raw))  # type: ignore[no-untyped-call]
            with raw.open("rb") as source, drafted(path) as draft, gzip.open(draft, "wb", compresslevel=3) as target:
                shutil.copyfileobj(source, target, 1 << 16)
