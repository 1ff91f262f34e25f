"""What the figures were taken on: processor, memory, versions, and how busy the machine was."""

from __future__ import annotations

import datetime
import os
import platform
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


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
