"""How long a device is at something: its own time. The host, which only asks for it, sees nothing of that."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up what is done inside of `running`, on whichever stream. Without streams the host's time is the device's.

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

    @contextmanager
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
        """Seconds since it was last reset or taken. It waits until the device has done it all."""
        for start, end in self._laps:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1e3
        found = self._seconds
        self.reset()
        return found


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
