"""Started by every Python process of a traced run (it is on their PYTHONPATH): writes down which files are entered.

A line per process, phase and function is appended to `$WAY_LOG`. The phase is the content of the file `$WAY_PHASE`,
read again every 20 ms. A job may note one step of the thread that trains with `step_begins` and `step_ends`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import CodeType, FrameType

LOG, PHASE, PACKAGE = os.environ.get("WAY_LOG", ""), os.environ.get("WAY_PHASE", ""), os.environ.get("WAY_PACKAGE", "")
_seen: set[tuple[int, str, str]] = set()
_now = ["", 0.0]


def note(phase: str, code: CodeType) -> None:
    filename = code.co_filename
    if not filename.startswith(PACKAGE):
        return
    key = (os.getpid(), phase, f"{filename[len(PACKAGE) :].lstrip('/')}\t{code.co_qualname}")
    if key not in _seen:
        _seen.add(key)
        with open(LOG, "a") as log:
            log.write(f"{key[0]}\t{phase}\t{key[2]}\n")


def watch(frame: FrameType, event: str, argument: object) -> None:
    if event != "call" or sys.is_finalizing():
        return
    now = time.monotonic()
    if now - _now[1] > 0.02:
        try:
            with open(PHASE) as file:
                _now[0] = file.read().strip()
        except OSError:
            _now[0] = ""
        _now[1] = now
    if _now[0]:
        note(_now[0], frame.f_code)


def step_begins() -> None:
    """Called by the job in the middle of a step: from here to the same place in the next step, everything is noted."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        note("step", frame.f_code)
        if frame.f_code.co_filename.endswith("worker/training.py"):
            break  # below it are the process and how it was started
        frame = frame.f_back
    sys.setprofile(lambda frame, event, argument: note("step", frame.f_code) if event == "call" else None)


def step_ends() -> None:
    sys.setprofile(None)


if LOG and PHASE:
    sys.setprofile(watch)
    threading.setprofile(watch)
