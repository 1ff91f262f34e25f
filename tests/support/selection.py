"""Which test files start processes: `make test-repeat` repeats them, `make test-quick` leaves them out."""

from __future__ import annotations

import re
from pathlib import Path

_SIGNS = re.compile(
    r"\bStage\b|\bsubprocess\b|\bos\.fork\b|coordinator\.process|\breaders\(|\bforked\b|\bin_child\b|psutil|\brun_plain\b|[Ss]iege\b"
)
_FOLDERS = ("e2e", "contract", "gpu")


def starts_processes(file: Path) -> bool:
    """By its folder, or by what its text names: the stage, subprocess, fork, a coordinator's process, data readers."""
    return any(folder in file.parts for folder in _FOLDERS) or bool(_SIGNS.search(file.read_text()))
