"""A false machine clock for the processes of one run, by Debian's libfaketime. The machine's own clock is not touched.

The library is preloaded into the run's processes. It reads from a file, at most once a second, how far their clock is
ahead; the monotonic clock stays right. Its clock_nanosleep (0.9.10) refuses monotonic deadlines, with which Python 3.11
and later sleep, so these processes sleep in `select` instead.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from distbelief.atomicfile import replace_file
from distbelief.errors import DistBeliefError
from distbelief.temporaryfolder import temporary_folder

_PLACES = ("/usr/lib/*/faketime", "/usr/lib/faketime", "/usr/lib64/faketime", "/usr/local/lib/faketime")
_OFFSET = "offset"
_SLEEP = """\
import importlib.machinery, importlib.util, select, sys, time

def sleep(seconds):
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        select.select([], [], [], left)

time.sleep = sleep
sys.path.remove({folder!r})
hidden = importlib.machinery.PathFinder.find_spec("sitecustomize")
if hidden:
    hidden.loader.exec_module(importlib.util.module_from_spec(hidden))
"""


def library() -> Path | None:
    found = (path for place in _PLACES for path in sorted(Path("/").glob(f"{place[1:]}/libfaketimeMT.so.1")))
    return next(found, None)


def require_library() -> Path:
    found = library()
    if found is None:
        raise DistBeliefError(
            "'set clock' needs libfaketime, which is not installed: the machine's own clock is never set",
            hint="as root, on Debian and its kin: apt-get install libfaketime",
        )
    return found


class FalseClock:
    """A context manager. Processes that are started with `environment` see the false clock."""

    def __init__(self) -> None:
        self._library = require_library()
        self._stack = contextlib.ExitStack()
        self._folder = self._stack.enter_context(temporary_folder("clock"))
        self._since = time.time()
        self.ahead_s = 0.0
        self.set(0.0)
        (self._folder / "sitecustomize.py").write_text(_SLEEP.format(folder=str(self._folder)))

    def __enter__(self) -> FalseClock:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        for path in Path("/dev/shm").glob("*faketime_s*"):  # killed processes leave it behind
            with contextlib.suppress(OSError, ValueError):
                there = path.stat()
                is_ours = there.st_uid == os.getuid() and there.st_mtime >= self._since
                if is_ours and not psutil.pid_exists(int(path.name.rpartition("_")[2])):
                    path.unlink()

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """What to add to the environment `own`."""
        return {
            "LD_PRELOAD": " ".join(filter(None, (str(self._library), own.get("LD_PRELOAD", "")))),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(self._folder), own.get("PYTHONPATH", "")))),
            "FAKETIME_TIMESTAMP_FILE": str(self._folder / _OFFSET),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",  # the name of earlier versions
            "NO_FAKE_STAT": "1",
        }

    @contextlib.contextmanager
    def in_children(self) -> Iterator[None]:
        """Processes that this one starts within this context see the false clock."""
        added = self.environment(os.environ)
        before = {name: os.environ.get(name) for name in added}
        os.environ.update(added)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value

    def turn(self, by_s: float) -> None:
        self.set(self.ahead_s + by_s)

    def set(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s
        replace_file(self._folder / _OFFSET, f"{ahead_s:+.0f}\n".encode())
