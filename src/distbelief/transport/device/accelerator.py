"""An accelerator for exchanges: device memory, pinned host memory, streams for copies, a clock of device time."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from distbelief.transport.shm.segment import Memory, Segment

_pinning = threading.Lock()
_pinned: weakref.WeakKeyDictionary[Segment, bool] = weakref.WeakKeyDictionary()


class DeviceMemory:
    """Device memory, initially zeros. See `Memory`.

    >>> DeviceMemory(8, torch.device("cpu")).tensor(torch.float32, 4, 1)
    tensor([0.])
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = size_bytes
        self._bytes = torch.zeros(size_bytes, dtype=torch.uint8, device=device)

    def tensor(self, dtype: torch.dtype, offset_bytes: int, numel: int) -> torch.Tensor:
        return self._bytes[offset_bytes : offset_bytes + numel * dtype.itemsize].view(dtype)


def memory_on(device: torch.device, size_bytes: int) -> Memory:
    """Private memory of this process on the device."""
    return Segment.private(size_bytes) if device.type == "cpu" else DeviceMemory(size_bytes, device)


@dataclass(frozen=True)
class Accelerator:
    """A device, and the device memory that this process keeps across generations."""

    device: torch.device
    kept: dict[str, Memory] = field(default_factory=dict)

    def keep(self, name: str, size_bytes: int) -> Memory:
        if name not in self.kept:
            self.kept[name] = DeviceMemory(size_bytes, self.device)
        return self.kept[name]

    def beside(self, size_bytes: int) -> Segment:
        """Pinned host memory, which the device reads and writes directly as long as the segment exists."""
        segment = Segment.private(size_bytes)
        if self.device.type == "cuda":
            pin(segment)
        return segment

    def finish(self) -> None:
        """Wait until the computing stream has finished all work."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def pin(segment: Segment) -> None:
    """Pin the segment, so that the device copies from and to it directly. If the system refuses, copies are slower;
    nothing else changes."""
    with _pinning:  # the copying thread and the training thread may both come here; registering twice is an error
        if segment in _pinned or not segment.size_bytes:
            return
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = segment.tensor(torch.uint8, 0, segment.size_bytes).data_ptr()
        _pinned[segment] = int(runtime.cudaHostRegister(address, segment.size_bytes, 0)) == 0
        if _pinned[segment]:  # unregister before the pages are reused
            weakref.finalize(segment, runtime.cudaHostUnregister, address).atexit = False
        else:  # clear the error, or the thread's next launch would report it
            with contextlib.suppress(RuntimeError):
                torch.empty(1, device="cuda").fill_(0)


class CopyStream:
    """A stream beside the computing stream: its copies run while shards are computed. A device without streams does all
    work at once, in order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _stream(device) if device.type == "cuda" else None

    def mark(self) -> torch.cuda.Event | None:
        """An event after all present work of the computing stream."""
        return torch.cuda.current_stream(self._stream.device).record_event() if self._stream else None

    @contextlib.contextmanager
    def after(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Work inside the block waits on the device for the event; the host continues. Callable from any thread."""
        if self._stream is None or mark is None:
            yield
            return
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            yield

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Work inside the block waits only for earlier work on this stream."""
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            yield

    def hand_over(self, tensors: Any) -> None:
        """Pass tensors to the computing stream, which waits until they are complete."""
        if self._stream is None:
            return
        computing = torch.cuda.current_stream(self._stream.device)
        computing.wait_stream(self._stream)
        for tensor in torch.utils._pytree.tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(computing)  # the memory is not reused before the computing stream is done with it

    def finish(self) -> None:
        """Wait on the host until all work on this stream is done."""
        if self._stream is not None:
            self._stream.synchronize()


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Stopwatch:
    """Measures device time of the work inside `running`, on any stream; the host only launches that work. Without
    streams, it measures host time.

    >>> watch = Stopwatch(torch.device("cpu"))
    >>> with watch.running():
    ...     _ = torch.ones(8).sum()
    >>> watch.take() > 0.0, watch.take()
    (True, 0.0)
    """

    def __init__(self, device: torch.device) -> None:
        self._streams = device.type == "cuda"
        self._seconds = 0.0
        self._laps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        if self._streams:
            self._laps.append((_event(), _event()))
            self._laps[-1][0].record()
            yield
            self._laps[-1][1].record()
        else:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started

    def reset(self) -> None:
        self._seconds = 0.0
        self._laps.clear()

    def take(self) -> float:
        """Seconds since the last reset or take. Waits until the device has finished the work."""
        for start, end in self._laps:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1e3
        found = self._seconds
        self.reset()
        return found


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
