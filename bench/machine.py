"""What the figures were taken on: processor, memory, versions, and how busy the machine was."""

from __future__ import annotations

import datetime
import os
import platform
import resource
import time
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch

import distbelief


def facts() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "kernel": platform.release(),
        "versions": {
            "distbelief": distbelief.__version__,
            "torch": str(torch.__version__),
            "numpy": numpy.__version__,
            "python": platform.python_version(),
        },
    }


def load() -> list[float]:
    """The load averages over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


class Bystanders:
    """How much of the machine's processor time went to others than our child processes, or was stolen by the
    hypervisor, from the making of this object to `share` (when the children must have ended). 0.5 of a machine with
    two cores: one of them was busy with something else all the time."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._busy_s = _busy_s()
        self._children_s = _children_s()

    def share(self) -> float:
        took_s = (time.monotonic() - self._started) * (os.cpu_count() or 1)
        others_s = (_busy_s() - self._busy_s) - (_children_s() - self._children_s)
        return max(0.0, others_s / took_s)


class Patience:
    """Seconds to spend on measuring again what was disturbed by others."""

    def __init__(self, seconds: float, limit: float = 0.1) -> None:
        self.retaken = 0
        self._left_s = seconds
        self._limit = limit

    def again(self, others: float, took_s: float) -> bool:
        """Whether a measurement with this much disturbance is to be taken once more. Blind to what was measured."""
        if others <= self._limit or took_s > self._left_s:
            return False
        self._left_s -= took_s
        self.retaken += 1
        return True


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
