"""How far a replay has come on its way to the step: whole lines for a file, one line that moves for a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

EVERY_S = 2.0
EVERY_ON_TERMINAL_S = 0.1


class WayShown:
    """Called after every step. Says nothing of a way that is shorter than a moment."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._moving = stream.isatty()
        self._every_s = EVERY_ON_TERMINAL_S if self._moving else EVERY_S
        self._shown_at: float | None = None
        self._shown = False

    def __call__(self, began_at: int, applied: int, target: int) -> None:
        now = self._clock()
        if self._shown_at is None:
            self._shown_at = now
        elif now - self._shown_at >= self._every_s and applied < target:
            self._shown_at = now
            done = f"{applied - began_at:,} of {target - began_at:,} done"
            self._write(f"executing steps {began_at} … {target - 1} again: {done}")

    def close(self) -> None:
        if self._shown and self._moving:
            self._shown = False
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _write(self, line: str) -> None:
        self._shown = True
        self._stream.write(f"\r\x1b[K{line}" if self._moving else f"{line}\n")
        self._stream.flush()
