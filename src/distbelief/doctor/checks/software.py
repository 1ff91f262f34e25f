"""Python, torch, numpy and the GPU's driver: their versions, and whether they work at all."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from distbelief.doctor.rules.report import Finding, ok, problem
from distbelief.version import __version__

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 6)
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Software:
    python: str
    torch: str
    numpy: str
    driver: str
    """NVIDIA's; empty: there is none."""
    cuda: str
    """What torch was built for; empty: the CPU alone."""
    error: str = ""
    """Why torch cannot be imported."""

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


def probe() -> Software:
    try:
        import torch
    except Exception as error:  # whatever is wrong with it
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return Software(platform.python_version(), "", _version("numpy"), _driver(), "", text)
    cuda = torch.version.cuda or ""
    return Software(platform.python_version(), str(torch.__version__), _version("numpy"), _driver(), cuda)


def judge(found: Software) -> Finding:
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
