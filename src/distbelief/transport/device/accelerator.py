"""An accelerator as exchanges see it: its memory, pinned host memory, streams for copies, a clock of device time."""

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
    """See `Memory`. It begins as zeros.

    >>> DeviceMemory(8, torch.device("cpu")).tensor(torch.float32, 4, 1)
    tensor([0.])
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = size_bytes
        self._bytes = torch.zeros(size_bytes, dtype=torch.uint8, device=device)

    def tensor(self, dtype: torch.dtype, offset_bytes: int, numel: int) -> torch.Tensor:
        return self._bytes[offset_bytes : offset_bytes + numel * dtype.itemsize].view(dtype)


def memory_on(device: torch.device, size_bytes: int) -> Memory:
    """Memory of this process alone."""
    return Segment.private(size_bytes) if device.type == "cpu" else DeviceMemory(size_bytes, device)


@dataclass(frozen=True)
class Accelerator:
    """A device, and the memory there that this process keeps from one generation to the next."""

    device: torch.device
    kept: dict[str, Memory] = field(default_factory=dict)

    def keep(self, name: str, size_bytes: int) -> Memory:
        if name not in self.kept:
            self.kept[name] = DeviceMemory(size_bytes, self.device)
        return self.kept[name]

    def beside(self, size_bytes: int) -> Segment:
        """Memory of the host that the device reads and writes by itself, for as long as the segment is held."""
        segment = Segment.private(size_bytes)
        if self.device.type == "cuda":
            pin(segment)
        return segment

    def finish(self) -> None:
        """Wait until the computing stream has finished all work."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def pin(segment: Segment) -> None:
    """Let the device copy from and to these pages by itself. Where the system permits no more such pages, copies are
    slower and nothing else changes."""
    with _pinning:  # a copy's thread and the training thread may both want to: the second would be told an error
        if segment in _pinned or not segment.size_bytes:
            return
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = segment.tensor(torch.uint8, 0, segment.size_bytes).data_ptr()
        _pinned[segment] = int(runtime.cudaHostRegister(address, segment.size_bytes, 0)) == 0
        if _pinned[segment]:  # not once the pages may be somebody else's
            weakref.finalize(segment, runtime.cudaHostUnregister, address).atexit = False
        else:  # the next launch of this thread would be taken for what has failed
            with contextlib.suppress(RuntimeError):
                torch.empty(1, device="cuda").fill_(0)


class CopyStream:
    """A stream of the device beside the computing stream: copies on it run while shards are computed. On a device
    without streams, all work is done at once, in order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _stream(device) if device.type == "cuda" else None

    def mark(self) -> torch.cuda.Event | None:
        """An event after all present work of the computing stream."""
        return torch.cuda.current_stream(self._stream.device).record_event() if self._stream else None

    @contextlib.contextmanager
    def after(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Work inside waits for that event, on the device; the host goes on. From any thread."""
        if self._stream is None or mark is None:
            yield
            return
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            yield

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Work inside waits only for work that is on this stream already."""
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            yield

    def hand_over(self, tensors: Any) -> None:
        """The computing stream uses these tensors from now on, and waits until they are complete."""
        if self._stream is None:
            return
        computing = torch.cuda.current_stream(self._stream.device)
        computing.wait_stream(self._stream)
        for tensor in torch.utils._pytree.tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(computing)  # its memory is not given away before

    def finish(self) -> None:
        """Wait on the host until all work on this stream is done."""
        if self._stream is not None:
            self._stream.synchronize()


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Stopwatch:
    """Adds up the device's own time for the work inside of `running`, on any stream. The host only launches that work
    and sees nothing of its time. Without streams, the host's time is the device's.

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
        """Seconds since it was last reset or taken. It waits until the device has finished that work."""
        for start, end in self._laps:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1e3
        found = self._seconds
        self.reset()
        return found


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
