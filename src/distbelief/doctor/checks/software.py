"""Python, torch, numpy and the GPU's driver: their versions, and whether they work; and processes of earlier runs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from distbelief.doctor.rules.report import Finding, ok, problem
from distbelief.version import __version__

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 13)
"""A test compares both with pyproject.toml. The installed package's metadata may be absent, or older than the code."""
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Software:
    python: str
    torch: str
    numpy: str
    driver: str
    """The version of NVIDIA's driver; empty: not installed."""
    cuda: str
    """The CUDA version of torch; empty: torch is built for the CPU only."""
    error: str = ""
    """The error of importing torch."""

    def facts(self) -> dict[str, str]:
        known = {
            "distbelief": __version__,
            "python": self.python,
            "torch": self.torch,
            "numpy": self.numpy,
            "driver": self.driver,
            "CUDA": self.cuda,
        }
        return {name: value for name, value in known.items() if value}


def probe_software() -> Software:
    try:
        import torch
    except Exception as error:  # a broken installation raises errors of many kinds
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return Software(platform.python_version(), "", _version("numpy"), _driver(), "", text)
    cuda = torch.version.cuda or ""
    return Software(platform.python_version(), str(torch.__version__), _version("numpy"), _driver(), cuda)


def judge_software(found: Software) -> Finding:
    about = "software"
    text = f"Python {found.python}, torch {found.torch}, numpy {found.numpy}"
    if found.driver:
        text += f", NVIDIA driver {found.driver}"
    if found.error:
        return problem(about, f"torch cannot be imported: {found.error}", "install it again: pip install torch")
    if not found.numpy:
        return problem(about, "numpy is not installed", "pip install numpy")
    if _numbers(found.python) < OLDEST_PYTHON:
        return problem(about, text, f"use Python {_dotted(OLDEST_PYTHON)} or newer")
    if _numbers(found.torch) < OLDEST_TORCH:
        return problem(about, text, f"install torch {_dotted(OLDEST_TORCH)} or newer")
    if found.driver and not found.cuda:
        return problem(about, f"{text}; there is a GPU, and torch was built without CUDA", "install torch with CUDA")
    return ok(about, text)


def _version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    module = sys.modules.get(package)
    return str(getattr(module, "__version__", ""))


def _driver() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", _DRIVER.read_text())
        return found[1] if found else ""
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    """
    >>> _numbers("2.13.0+cpu")
    (2, 13)
    """
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


# --- processes of earlier runs that are orphans, or stopped -----------------------------------------------------------


_OURS = ("distbelief.coordinator", "distbelief.launch.zygote", "distbelief.kv")


@dataclass(frozen=True)
class Process:
    pid: int
    what: str
    """The module that the process runs."""
    orphan: bool
    """Whether the starting process is gone."""
    stopped: bool
    memory: int = 0


def probe_leftovers() -> list[Process]:
    found = []
    first_is_ours = _is_python(1)  # in a container the first process may be the launching program itself
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            what = next((word for word in words if word in _OURS), "")
            if what and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                orphan = process.ppid() == 1 and not first_is_ours
                stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
                found.append(Process(process.pid, what, orphan, stopped, process.memory_info().rss))
        except psutil.Error:  # the process has ended, or belongs to another user
            continue
    return found


def _is_python(pid: int) -> bool:
    try:
        return "python" in psutil.Process(pid).name()
    except psutil.Error:
        return False


def judge_leftovers(found: list[Process]) -> Finding:
    about = "processes"
    bad = [one for one in found if one.orphan or one.stopped]
    if bad:
        told = [f"{one.pid} ({one.what}, {'stopped' if one.stopped else 'left behind'})" for one in bad]
        return problem(
            about, f"of earlier runs: {', '.join(told)}", f"end them: kill -9 {' '.join(str(one.pid) for one in bad)}"
        )
    running = sum(one.what == "distbelief.coordinator" for one in found)
    if running:
        return ok(about, f"{running} run{'s' * (running > 1)} on this machine; nothing is left behind")
    return ok(about, "nothing is left behind")
